"""Loads the ops (native/tensorflow) into TensorFlow, and connects them to the core: its context and its dtypes.

`ops` has the generated functions: ops.bagua_hvd_allreduce(tensors, ...) and so on; see the *_register functions there.
"""
import ctypes
from pathlib import Path
from typing import Any

import tensorflow as tf

from bagua_hvd.core import native, vectors
from bagua_hvd.job import basics


def _load():
    path = Path(__file__).parent / "_ops.abi3.so"
    if not path.exists():
        raise ImportError(f"{path.name} is not built: run `pip install .` in the source folder of bagua_hvd")
    loaded = tf.load_op_library(str(path))
    library = ctypes.CDLL(str(path))
    library.bhvd_tf_problem.restype = ctypes.c_char_p
    problem = library.bhvd_tf_problem()
    if problem:
        raise ImportError(problem.decode())
    library.bhvd_tf_xla_missing.restype = ctypes.c_char_p
    library.bhvd_tf_wanted.restype = ctypes.c_char_p
    library.bhvd_tf_supply.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.bhvd_tf_set_context.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
    index = 0
    while name := library.bhvd_tf_wanted(index):
        library.bhvd_tf_supply(index, native.function_address(name.decode()))
        index += 1
    return loaded, library


ops, library = _load()
# The destructor in cffi's form, for ffi.gc.
release = native.ffi.cast("void (*)(void *)", ctypes.cast(library.bhvd_tf_release, ctypes.c_void_p).value)


_context: object = None


def _take_context(context, options):
    """Gives the ops each new context, and keeps it alive until no op uses it."""
    global _context
    address, local_rank, local_size = (
        (context.address, options.local_rank, options.local_size) if context else (None, 0, 0)
    )
    library.bhvd_tf_set_context(address, local_rank, local_size)
    # ctypes releases the GIL, which ops that end meanwhile may need.
    library.bhvd_tf_drain()
    _context = context


basics.runtime.on_context_change(_take_context)


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
