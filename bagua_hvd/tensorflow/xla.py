"""The ops as custom calls (native/tensorflow/xla.c) in programs that XLA compiles, tf.function(jit_compile=True).

A collective is a pair of calls, post and wait. Each wait takes a token from the wait before it (graphs.order). So
every rank waits in program order, and no wait can delay a post for which another rank waits first.
"""
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from bagua_hvd.core import native
from bagua_hvd.tensorflow.graphs import order, xla_custom_call
from bagua_hvd.tensorflow.native_ops import library, native_dtype

missing = library.bhvd_tf_xla_missing() or (b"" if xla_custom_call else b"xla_custom_call_v2")


def _check():
    if missing:
        raise NotImplementedError(
            f"collectives in a function compiled by XLA need {missing.decode()}, which the installed TensorFlow does "
            "not have: use jit_compile=False"
        )


def _call(target, text, operands, dtypes, shapes):
    _check()
    return xla_custom_call(
        operands=operands, call_target_name=f"bagua_hvd.{target}", backend_config=text, has_side_effect=True,
        result_dtypes=dtypes, result_shapes=shapes,
    )


def _describe(tensor):
    """The tensor as "dtype ndim dims bytes" for xla.c."""
    shape = static_shape(tensor)
    dtype = native_dtype(tensor.dtype)
    return " ".join(map(str, (dtype, len(shape), *shape, native.dtype_size(dtype) * math.prod(shape))))


def static_shape(tensor: tf.Tensor) -> list[int]:
    """The shape. ValueError: it is not fully known."""
    if not tensor.shape.is_fully_defined():
        raise ValueError(
            f"{tensor.name} has the shape {tensor.shape}: a function compiled by XLA communicates tensors of known "
            "shapes only; use jit_compile=False"
        )
    return tensor.shape.as_list()


def _wait(target, text, running, dtypes, shapes):
    *outputs, token = _call(target, text, [*running, *order.read()], [*dtypes, tf.int64], [*shapes, [1]])
    order.write(token)
    return outputs


def collective(kind: Any, tensors: Sequence[tf.Tensor], shapes: Any, name: str, process_set_id: int,
               op: int = native.OP_SUM, root_rank: int = 0, prescale_factor: float = 1.0,
               postscale_factor: float = 1.0) -> Any:
    """The results of a collective with known output shapes; for a barrier an int32 scalar.

    Args:
        kind: a native kind. shapes: of the results, lists of ints; the step fails if a result has another one.
            Others: see operations.Posting.post.
    Raises:
        ValueError: a tensor's shape is not known. NotImplementedError: this TensorFlow lacks custom calls.
    """
    described = [
        f"{_describe(tensor)} {native.dtype_size(native_dtype(tensor.dtype)) * math.prod(shape)}"
        for tensor, shape in zip(tensors, shapes, strict=True)
    ]
    factors = struct.unpack("2q", struct.pack("2d", prescale_factor, postscale_factor))
    text = " ".join(map(str, (kind, process_set_id, op, root_rank, *factors, len(tensors), *described, name)))
    # A barrier runs after everything before it, by a data dependency: XLA knows no other order.
    after = [] if tensors else order.read()
    running, _ = _call("post", text, [*tensors, *after], [tf.int64, tf.int64], [[1], [1]])
    dtypes = [tensor.dtype for tensor in tensors]
    return _wait("wait", "", [running], dtypes or [tf.int32], shapes or [[]])


def exchange(bridge_id: int, tensors: Sequence[tf.Tensor], indices: Iterable[int], again: bool) -> Any:
    """Bridge.exchange() for XLA. again: puts follow the previous wait."""
    after = order.read() if again else order.first(order.read)
    running = [
        _call("put", f"{bridge_id} {index} {_describe(tensor)}", [tensor, *after], [tf.int64, tf.int64], [[1], [1]])[0]
        for index, tensor in zip(indices, tensors, strict=True)
    ]
    shapes = [static_shape(tensor) for tensor in tensors]
    return _wait("finish", f"{bridge_id} {len(tensors)}", running, [tensor.dtype for tensor in tensors], shapes)


def fact(name: str, process_set_id: int) -> Any:
    """The op BaguaHvdFact for XLA."""
    return _call("fact", f"{process_set_id} {name}", [], [tf.int32, tf.int64], [[], [1]])[0]
