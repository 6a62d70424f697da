"""The NumPy adapter of the collectives; arrays are communicated without a copy."""
from typing import Any

import numpy as np

from bagua_hvd.collectives.frontend import Frontend
from bagua_hvd.core import native
from bagua_hvd.core.native import TensorView
from bagua_hvd.core.vectors import DTYPES


class NumpyFrontend(Frontend):
    """NumPy arrays, C-contiguous, as the core sees them."""

    name = "numpy"
    reducible = frozenset({
        native.UINT8, native.INT8, native.INT32, native.INT64, native.FLOAT16, native.FLOAT32, native.FLOAT64,
        native.BFLOAT16,
    })

    def view(self, tensor: Any, output: Any = None) -> Any:
        dtype = DTYPES.get(tensor.dtype.name)
        if dtype is None:
            raise ValueError(f"Tensor type {self.type_name(tensor)} is not supported.")
        dst = 0 if output is None else output.ctypes.data
        return TensorView(tensor.ctypes.data, dst, tensor.shape, dtype, (tensor, output))

    def allocate_like(self, tensor: Any, dim0: int | None = None) -> Any:
        shape = tensor.shape if dim0 is None else (dim0, *tensor.shape[1:])
        return np.empty(shape, tensor.dtype)

    def wrap_result(self, nbytes: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        numpy_dtype: np.dtype = np.dtype(native.dtype_name(dtype))
        if not nbytes:
            return np.empty(shape, numpy_dtype)
        return np.frombuffer(native.buffer(owner, nbytes), numpy_dtype).reshape(shape)

    def int32_tensor(self, values: Any, like: Any = None) -> Any:
        return np.array(values, np.int32)

    def splits(self, splits: Any) -> list:
        return [int(split) for split in splits]

    def shape(self, tensor: Any) -> Any:
        return tensor.shape

    def type_name(self, tensor: Any) -> str:
        return f"numpy.{tensor.dtype}"


frontend = NumpyFrontend()
