"""The adapter through which the rules (rules.py) work on arrays of NumPy; a framework overrides it for its tensors.

An adapter holds no policy. A rule that two adapters would share belongs in rules.py.
"""
from typing import Any

import numpy as np

from bagua_hvd.core import native
from bagua_hvd.core.native import TensorView
from bagua_hvd.core.vectors import DTYPES


class Frontend:
    """Here NumPy arrays, C-contiguous, communicated without a copy. A front end has one instance.

    Attributes:
        reducible: native dtypes that allreduce and reducescatter take.
    """

    reducible: frozenset = frozenset({
        native.UINT8, native.INT8, native.INT32, native.INT64, native.FLOAT16, native.FLOAT32, native.FLOAT64,
        native.BFLOAT16,
    })

    def view(self, tensor: Any, output: Any = None) -> Any:
        """The TensorView from `tensor` to `output`; None: the core allocates the result; `tensor` itself: in place.

        Raises:
            ValueError: dtype or device not supported ("Tensor type ... is not supported."), or not contiguous.
        """
        dtype = DTYPES.get(tensor.dtype.name)
        if dtype is None:
            raise ValueError(f"Tensor type {self.type_name(tensor)} is not supported.")
        dst = 0 if output is None else output.ctypes.data
        return TensorView(tensor.ctypes.data, dst, tensor.shape, dtype, (tensor, output))

    def allocate_like(self, tensor: Any, dim0: int | None = None) -> Any:
        """An uninitialized, contiguous tensor like `tensor`, with first dimension `dim0` when given."""
        return np.empty(tensor.shape if dim0 is None else (dim0, *tensor.shape[1:]), tensor.dtype)

    def wrap_result(self, nbytes: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        """A tensor over the `nbytes` of `owner` (native.buffer), without a copy; keeps it alive. 0: owner is None."""
        numpy_dtype: np.dtype = np.dtype(native.dtype_name(dtype))
        if not nbytes:
            return np.empty(shape, numpy_dtype)
        return np.frombuffer(native.buffer(owner, nbytes), numpy_dtype).reshape(shape)

    def typed(self, tensor: Any, like: Any) -> Any:
        """Casts a result in bytes to the type of tensor `like`, which view() may have passed as bytes."""
        return tensor

    def int32_tensor(self, values: Any, like: Any = None) -> Any:
        """A 1-D int32 tensor of the Python ints, on the device of tensor `like` when that is a tensor."""
        return np.array(values, np.int32)

    def splits(self, splits: Any) -> Any:
        """The alltoall splits (a list or a 1-D int32 tensor) as a list of ints. ValueError: not int32, not 1-D."""
        return [int(split) for split in splits]

    def shape(self, tensor: Any) -> Any:
        """The tensor's shape as a tuple of ints."""
        return tensor.shape

    def type_name(self, tensor: Any) -> Any:
        """The name of the tensor's type in error messages."""
        return f"numpy.{tensor.dtype}"


numpy_frontend = Frontend()
