"""TensorFlow's dtypes and the core's."""
from typing import Any

import tensorflow as tf

from bagua_hvd.core import vectors

DTYPES: dict[tf.DType, int] = {tf.as_dtype(name): code for name, code in vectors.DTYPES.items()}
# The core cannot compute with these dtypes; they are sent as dtypes that hold their values.
_WIRE_DTYPES = {tf.uint32: tf.int32, tf.uint64: tf.int64}


def to_wire(tensor: tf.Tensor) -> Any:
    """The tensor in a form that the core can move; a complex one gets another shape."""
    if tensor.dtype.is_complex:
        return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)       # XLA casts no bits of complex numbers
    if tensor.dtype in _WIRE_DTYPES:
        return tf.bitcast(tensor, _WIRE_DTYPES[tensor.dtype])
    return tf.cast(tensor, tf.bfloat16) if tensor.dtype.name.startswith("float8") else tensor


def rows_to_wire(tensor: tf.Tensor) -> Any:
    """Like to_wire(), for operations on rows: a scalar stays one, so that the core refuses it on all ranks."""
    return tf.math.real(tensor) if tensor.dtype.is_complex and tensor.shape.rank == 0 else to_wire(tensor)


def from_wire(tensor: tf.Tensor, dtype: Any) -> Any:
    """The inverse of to_wire()."""
    if dtype.is_complex:
        return tf.complex(tensor[..., 0], tensor[..., 1])
    if dtype in _WIRE_DTYPES:
        return tf.bitcast(tensor, dtype)
    return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)


def native_dtype(dtype: Any) -> Any:
    """The core's number for a tf.DType. ValueError: the core does not support it."""
    try:
        return DTYPES[tf.as_dtype(dtype)]
    except KeyError:
        raise ValueError(f"Tensor type {dtype} is not supported.") from None
