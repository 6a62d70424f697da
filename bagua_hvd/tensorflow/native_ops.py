"""Loads the ops (native/tensorflow) into TensorFlow, and connects them to the core and its context.

`ops` has the generated functions: ops.bagua_hvd_allreduce(tensors, ...) and so on; see the *_register functions there.
"""
import ctypes
from pathlib import Path

import tensorflow as tf

from bagua_hvd.core import native
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
