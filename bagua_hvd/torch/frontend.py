"""PyTorch's tensors as the core sees them."""
import torch

from bagua_hvd.common import native
from bagua_hvd.common.frontend import Frontend
from bagua_hvd.common.native import TensorView

DTYPES = {
    torch.uint8: native.UINT8,
    torch.int8: native.INT8,
    torch.int16: native.INT16,
    torch.int32: native.INT32,
    torch.int64: native.INT64,
    torch.float16: native.FLOAT16,
    torch.float32: native.FLOAT32,
    torch.float64: native.FLOAT64,
    torch.bool: native.BOOL,
    torch.bfloat16: native.BFLOAT16,
}
if hasattr(torch, "uint16"):
    DTYPES[torch.uint16] = native.UINT16
TORCH_DTYPES = {code: dtype for dtype, code in DTYPES.items()}


class TorchFrontend(Frontend):
    name = "torch"
    reducible = frozenset(
        {native.INT32, native.INT64, native.FLOAT16, native.FLOAT32, native.FLOAT64, native.BFLOAT16}
    )

    def view(self, tensor, output=None):
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None or not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
            self._refuse(tensor)
        src = tensor.data_ptr()
        if output is tensor:
            return TensorView(src, src, tensor.shape, dtype, tensor)
        if output is None:
            return TensorView(src, 0, tensor.shape, dtype, tensor)
        return TensorView(src, output.data_ptr(), tensor.shape, dtype, (tensor, output))

    def _refuse(self, tensor):
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
            raise ValueError(f"Tensor type {self.type_name(tensor)} is not supported.")
        if not tensor.is_cpu:
            raise ValueError(
                f"Tensor type {self.type_name(tensor)} is not supported: this build of bagua_hvd serves CPU tensors, "
                f"and this one is on {tensor.device}."
            )
        raise ValueError("Tensor is required to be contiguous: call .contiguous() on it first.")

    def allocate_like(self, tensor, dim0=None):
        if dim0 is None:
            return torch.empty_like(tensor)
        return torch.empty((dim0, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)

    def wrap_result(self, address, nbytes, shape, dtype, owner):
        if not nbytes:
            return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="cpu")
        return torch.frombuffer(native.buffer(owner, nbytes), dtype=TORCH_DTYPES[dtype]).view(shape)

    def int32_tensor(self, values, like=None):
        device = like.device if isinstance(like, torch.Tensor) else "cpu"
        return torch.tensor(values, dtype=torch.int32, device=device)

    def splits(self, splits):
        if isinstance(splits, torch.Tensor):
            if splits.dtype is not torch.int32:
                raise ValueError(f"alltoall expects 32-bit integer splits, not {splits.dtype}.")
            if splits.dim() != 1:
                raise ValueError(f"alltoall expects a 1-D splits tensor, not {splits.dim()}-D.")
            return splits.tolist()
        tensor = torch.as_tensor(list(splits))
        if tensor.dim() != 1 or (tensor.numel() and (tensor.is_floating_point() or tensor.dtype is torch.bool)):
            raise ValueError(f"alltoall expects splits to be a list of integers, not {splits!r}.")
        return tensor.tolist()

    def shape(self, tensor):
        return tuple(tensor.shape)

    def type_name(self, tensor):
        return tensor.type()


frontend = TorchFrontend()
