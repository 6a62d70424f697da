"""Views of PyTorch's tensors for the core."""
from typing import Any

import numpy as np
import torch
from torch import strided

from bagua_hvd.collectives.frontend import Frontend
from bagua_hvd.core import native, vectors
from bagua_hvd.core.device import Placement, device
from bagua_hvd.core.native import TensorView, tensor_view
from bagua_hvd.torch.shards import is_sharded

DTYPES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in vectors.DTYPES.items()}
# The core cannot compute with these dtypes, but moves them as bytes, in one more dimension.
_MOVED = {dtype for name in ("complex32", "complex64", "complex128", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
                             "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
          if (dtype := getattr(torch, name, None)) is not None}
TORCH_DTYPES = {code: dtype for dtype, code in DTYPES.items()}


def _numpy_dtypes():
    try:
        torch.from_numpy(np.empty(0))
    except RuntimeError:        # PyTorch without NumPy, or built for another major version
        return {}
    return {code: np.dtype(str(dtype).removeprefix("torch."))
            for dtype, code in DTYPES.items() if dtype is not torch.bfloat16}


_NUMPY_DTYPES = _numpy_dtypes()


def _bytes_of(tensor):
    """The tensor's memory as bytes, with one more dimension for the bytes of an element."""
    return tensor.detach().unsqueeze(-1).view(torch.uint8)


def check_memory(tensor: torch.Tensor) -> None:
    """Raises ValueError if the storage was freed: PyTorch would still read it. The core checks tensors it sends."""
    if tensor.layout is strided and tensor.numel() and not tensor.data_ptr():
        raise ValueError("Tensor has elements but no memory: its storage has been freed.")


class TorchPlacement(Placement):
    """A GPU, by PyTorch's index."""

    def __init__(self, index: int) -> None:
        super().__init__(device(index))
        self._torch_device = torch.device("cuda", index)
        self._streams = [torch.cuda.ExternalStream(stream, device=self._torch_device)
                         for stream in (self.device.to_host, self.device.from_host)]

    def stream(self) -> Any:
        return torch.cuda.current_stream(self._torch_device).cuda_stream

    def adopt(self, tensor: torch.Tensor) -> Any:
        return tensor.to(self._torch_device)

    def view(self, tensor: torch.Tensor, output: Any, dtype: Any) -> Any:
        """As Frontend.view(). The memory is not reused before the core's streams are done with it."""
        for stream in self._streams:
            tensor.record_stream(stream)
            if output is not None and output is not tensor:
                output.record_stream(stream)
        dst = 0 if output is None else output.data_ptr()
        return TensorView(tensor.data_ptr(), dst, tensor.shape, dtype, (tensor, output), self)


class TorchFrontend(Frontend):
    reducible = frozenset(
        {native.INT32, native.INT64, native.FLOAT16, native.FLOAT32, native.FLOAT64, native.BFLOAT16}
    )

    def __init__(self) -> None:
        self._placements: dict[int, Any] = {}       # by index of the GPU

    def view(self, tensor: torch.Tensor, output: Any = None) -> Any:
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None or tensor.layout is not strided or not tensor.is_contiguous() or tensor.is_neg():
            return self._view_of_bytes(tensor, output)
        if not tensor.is_cpu:
            return self._placement(tensor, output).view(tensor, output, dtype)
        src = tensor.data_ptr()
        if not src and is_sharded(tensor):
            raise ValueError("Tensor is a DTensor, of which each rank holds a part: call .to_local() on it first.")
        if output is tensor:
            return tensor_view((src, src, tensor.shape, dtype, tensor, None, False))
        if output is None:
            return tensor_view((src, 0, tensor.shape, dtype, tensor, None, False))
        return tensor_view((src, output.data_ptr(), tensor.shape, dtype, (tensor, output), None, False))

    def _view_of_bytes(self, tensor, output):
        if (tensor.dtype not in _MOVED or tensor.layout is not strided or not tensor.is_contiguous()
                or tensor.is_neg() or tensor.is_conj()):
            self._refuse(tensor)
        if not tensor.is_meta:
            check_memory(tensor)
        src = _bytes_of(tensor)
        return self.view(src, src if output is tensor else None if output is None else _bytes_of(output))

    def typed(self, tensor: torch.Tensor, like: Any) -> Any:
        return tensor if like.dtype in DTYPES else tensor.view(like.dtype).squeeze(-1)

    @staticmethod
    def moves(dtype: Any) -> bool:
        """Whether collectives that only move values accept the dtype."""
        return dtype in DTYPES or dtype in _MOVED

    def _refuse(self, tensor):
        if not self.moves(tensor.dtype) or tensor.layout is not strided:
            remedy = "" if tensor.layout is strided else " Use hvd.sparse_allreduce_async(), or .to_dense() first."
            raise ValueError(f"Tensor type {self.type_name(tensor)} is not supported.{remedy}")
        if tensor.is_neg():
            raise ValueError("Tensor is the negative of what its memory holds: call .resolve_neg() on it first.")
        if tensor.is_conj():
            raise ValueError("Tensor is the conjugate of what its memory holds: call .resolve_conj() on it first.")
        raise ValueError("Tensor is required to be contiguous. Call .contiguous() on it first.")

    def _placement(self, tensor, output):
        if not tensor.is_cuda:
            raise ValueError(
                f"Tensor type {self.type_name(tensor)} is not supported: bagua_hvd serves tensors of the CPU and of "
                f"CUDA, and this one is on {tensor.device}."
            )
        if output is not None and output.device != tensor.device:
            raise ValueError(f"the tensor is on {tensor.device}, but its output on {output.device}: give both one.")
        index = tensor.device.index
        placement = self._placements.get(index)
        if placement is None:
            placement = self._placements[index] = TorchPlacement(index)
        return placement

    def allocate_like(self, tensor: torch.Tensor, dim0: int | None = None) -> Any:
        if dim0 is None:
            return torch.empty_like(tensor)
        return torch.empty((dim0, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)

    def wrap_result(self, nbytes: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        if not nbytes:
            return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="cpu")
        memory = native.buffer(owner, nbytes)
        numpy_dtype = _NUMPY_DTYPES.get(dtype)
        if numpy_dtype is None:
            return torch.frombuffer(memory, dtype=TORCH_DTYPES[dtype]).view(shape)
        return torch.from_numpy(np.ndarray(shape, numpy_dtype, memory))     # takes half the time of a view

    def int32_tensor(self, values: Any, like: Any = None) -> Any:
        device = like.device if isinstance(like, torch.Tensor) else "cpu"
        return torch.tensor(values, dtype=torch.int32, device=device)

    def splits(self, splits: Any) -> Any:
        if isinstance(splits, torch.Tensor):
            if splits.is_meta:
                raise ValueError("alltoall expects splits with values, not a tensor on the meta device.")
            if splits.dtype is not torch.int32:
                raise ValueError(f"alltoall expects 32-bit integer splits, not {splits.dtype}.")
            if splits.dim() != 1:
                raise ValueError(f"alltoall expects a 1-D splits tensor, not {splits.dim()}-D.")
            return splits.tolist()
        try:
            tensor = torch.as_tensor(list(splits))
        except (RuntimeError, TypeError) as error:      # torch has no dtype for them, or they are no list
            raise ValueError(f"alltoall expects splits to be a list of integers, not {splits!r:.100}.") from error
        if tensor.dim() != 1 or (tensor.numel() and (tensor.is_floating_point() or tensor.dtype is torch.bool)):
            raise ValueError(f"alltoall expects splits to be a list of integers, not {splits!r}.")
        return tensor.tolist()

    def shape(self, tensor: torch.Tensor) -> Any:
        return tuple(tensor.shape)

    def type_name(self, tensor: torch.Tensor) -> Any:
        return tensor.type() if tensor.layout is strided else f"{tensor.layout} of {tensor.dtype}"


frontend = TorchFrontend()
