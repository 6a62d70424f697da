"""The collectives over TensorFlow's tensors, in all of Horovod's variants. The rules are in collectives/rules.py.

This file has only what is specific to TensorFlow: IndexedSlices, numbers of the job as ops, name scopes. All functions
support eager code, tf.function, sessions of tf.compat.v1, and XLA (docs/decisions/frontends.md).
"""
from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from bagua_hvd.collectives import rules
from bagua_hvd.collectives.compression import Compressor
from bagua_hvd.collectives.rules import handle_average_backwards_compatibility
from bagua_hvd.core.native import TensorView, ffi
from bagua_hvd.core.util import num_rank_is_power_2 as check_num_rank_power_of_2  # noqa: F401  (Horovod's name)
from bagua_hvd.core.vectors import native_order
from bagua_hvd.job import basics
from bagua_hvd.job.basics import *  # noqa: F403  (of this module, too)
from bagua_hvd.job.basics import Adasum, Average, Max, Min, Product, Sum, is_homogeneous  # noqa: F401
from bagua_hvd.job.process_sets import ProcessSet, check_registered, global_process_set, registered_id
from bagua_hvd.tensorflow import collective_ops
from bagua_hvd.tensorflow.bridge import Bridge
from bagua_hvd.tensorflow.compression import Compression
from bagua_hvd.tensorflow.graphs import as_written, form_of, public
from bagua_hvd.tensorflow.native_ops import from_wire, rows_to_wire, to_wire

Tensorlike: TypeAlias = tf.types.experimental.TensorLike        # accepted by tf.convert_to_tensor

_basics = basics
_DIFFERENTIABLE = "Differentiable. In a graph: the tensor that will hold the result."
_LIST = " Returns a list; an empty one as it is."
_COMPRESSION = "Compression.none, Compression.fp16 or your own: applied before, undone after."
_DEVICE = "unused, for compatibility with Horovod."
_SCOPE = "whether operations are named without TensorFlow's name scope."
_OF_SLICES = {"compression": _COMPRESSION, "device_dense": _DEVICE}
_OF_SUMS = {**_OF_SLICES, "device_sparse": _DEVICE, "ignore_name_scope": _SCOPE}
_SPARSE = (
    _DIFFERENTIABLE + " tf.IndexedSlices are gathered, duplicates kept: with op Sum or Average and without factors, "
    "else NotImplementedError. Their Average is what TensorFlow's `/` makes of integers: float32 of those of 8 and 16 "
    "bits, float64 of those of 32 and 64."
)


def _dense(tensor):
    if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
        raise TypeError(f"collectives take dense tensors, not a {type(tensor).__name__}: send its parts, such as "
                        "values, one by one")
    return tf.convert_to_tensor(native_order(tensor))       # TensorFlow would take the bytes as they are


def _compressed(compression, reduce, tensors, *arguments, label):
    """Dense tensors, compressed, reduced by a function of collective_ops with these arguments, and decompressed."""
    pairs = [compression.compress(_dense(tensor)) for tensor in tensors]
    reduced = reduce([compressed for compressed, _ in pairs], *arguments, label=label)
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


# ---------------------------------------------------------------------------------------------------- allreduce ----


def _divided(values, divisor):
    """Divides like `/`: integers of 8 and 16 bits become float32, of 32 and 64 bits float64."""
    if values.dtype.is_integer:
        values = values / tf.ones([], values.dtype)     # first, since 8 bits may not hold the divisor
    return values / tf.cast(divisor, values.dtype)


def _sparse_allreduce(slices, name, op, prescale_factor, postscale_factor, process_set, ignore_name_scope):
    if op == Adasum:
        raise NotImplementedError(
            "The Adasum reduction does not support sparse tensors: use sparse_as_dense=True to make them dense."
        )
    if op not in (Average, Sum):
        raise NotImplementedError("sparse tensors (tf.IndexedSlices) are reduced with Average or Sum only")
    if prescale_factor != 1.0 or postscale_factor != 1.0:
        raise NotImplementedError("sparse tensors (tf.IndexedSlices) take no prescale_factor and no postscale_factor")
    part = "{}.{}".format if name else lambda *_: None
    id = registered_id(process_set)
    values = collective_ops.allgather([_dense(slices.values)], part(name, "values"), id, ignore_name_scope)[0]
    indices = collective_ops.allgather([_dense(slices.indices)], part(name, "indices"), id, ignore_name_scope)[0]
    if op == Average:
        values = _divided(values, collective_ops.fact("size", id))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _allreduce(tensors, name, op, prescale_factor, postscale_factor, process_set, ignore_name_scope, label):
    id = registered_id(process_set)
    rules.check_op(op, id, basics.runtime.context)
    return collective_ops.allreduce(tensors, name, op, prescale_factor, postscale_factor, id, ignore_name_scope, label)


@form_of(rules.allreduce, _SPARSE, **_OF_SUMS)
def allreduce(tensor: Tensorlike | tf.IndexedSlices, average: bool | None = None, device_dense: str = "",
              device_sparse: str = "", compression: type[Compressor] = Compression.none, op: int | None = None,
              prescale_factor: float = 1.0, postscale_factor: float = 1.0, name: str | None = None,
              process_set: ProcessSet = global_process_set,
              ignore_name_scope: bool = False) -> tf.Tensor | tf.IndexedSlices:
    op = handle_average_backwards_compatibility(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        return _sparse_allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set, ignore_name_scope)
    return _compressed(compression, _allreduce, [tensor], name, op, prescale_factor, postscale_factor, process_set,
                       ignore_name_scope, label="HorovodAllreduce")[0]


@form_of(rules.grouped_allreduce, _SPARSE + _LIST, **_OF_SUMS)
def grouped_allreduce(tensors: Sequence[Tensorlike | tf.IndexedSlices], average: bool | None = None,
                      device_dense: str = "", device_sparse: str = "", compression: type[Compressor] = Compression.none,
                      op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
                      name: str | None = None) -> list[tf.Tensor | tf.IndexedSlices]:
    tensors = rules.listed(tensors)
    if not tensors:
        return tensors
    op = handle_average_backwards_compatibility(op, average)
    arguments = op, prescale_factor, postscale_factor, process_set, ignore_name_scope
    results = tensors.copy()
    dense = []
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            results[index] = _sparse_allreduce(tensor, f"{name}.{index}" if name else None, *arguments)
        else:
            dense.append(index)
    if dense:
        reduced = _compressed(compression, _allreduce, [tensors[index] for index in dense], name, *arguments,
                              label="HorovodGroupedAllreduce")
        for index, tensor in zip(dense, reduced, strict=True):
            results[index] = tensor
    return results


# ------------------------------------------------------------------------------- allgather, broadcast, alltoall ----


def _allgather(tensors, name, process_set, ignore_name_scope, label):
    tensors = [_dense(tensor) for tensor in tensors]
    gathered = collective_ops.allgather([rows_to_wire(tensor) for tensor in tensors], name,
                                        registered_id(process_set), ignore_name_scope, label)
    return [from_wire(result, tensor.dtype) for result, tensor in zip(gathered, tensors, strict=True)]


@form_of(rules.allgather, _DIFFERENTIABLE, ignore_name_scope=_SCOPE)
def allgather(tensor: Tensorlike, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> tf.Tensor:
    return _allgather([tensor], name, process_set, ignore_name_scope, "HorovodAllgather")[0]


@form_of(rules.grouped_allgather, _DIFFERENTIABLE + _LIST, ignore_name_scope=_SCOPE)
def grouped_allgather(tensors: Sequence[Tensorlike], name: str | None = None, ignore_name_scope: bool = False,
                      process_set: ProcessSet = global_process_set) -> list[tf.Tensor]:
    tensors = rules.listed(tensors)
    if not tensors:
        return tensors
    return _allgather(tensors, name, process_set, ignore_name_scope, "HorovodGroupedAllgather")


@form_of(rules.broadcast, _DIFFERENTIABLE, ignore_name_scope=_SCOPE)
def broadcast(tensor: Tensorlike, root_rank: int, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> tf.Tensor:
    tensor = _dense(tensor)
    [received] = collective_ops.broadcast([to_wire(tensor)], root_rank, name, registered_id(process_set),
                                          ignore_name_scope)
    return from_wire(received, tensor.dtype)


def _int32_splits(splits):
    if isinstance(splits, (list, tuple)):
        return tf.convert_to_tensor(splits, tf.int32)
    splits = _dense(splits)
    if splits.dtype != tf.int32:
        raise tf.errors.InvalidArgumentError(
            None, None, f"alltoall expects 32-bit integer splits, not {splits.dtype.name}."
        )
    return splits


@form_of(rules.alltoall, _DIFFERENTIABLE + " Without `splits` the output alone.", ignore_name_scope=_SCOPE)
def alltoall(tensor: Tensorlike, splits: Tensorlike | None = None, name: str | None = None,
             ignore_name_scope: bool = False,
             process_set: ProcessSet = global_process_set) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    rows = _int32_splits(splits) if splits is not None else None
    tensor = _dense(tensor)
    output, received = collective_ops.alltoall(rows_to_wire(tensor), rows, name, registered_id(process_set),
                                               ignore_name_scope)
    output = from_wire(output, tensor.dtype)
    return output if splits is None else (output, received)


# ------------------------------------------------------------------------------------------------ reducescatter ----


def _reducescatter(tensors, device_dense, compression, name, op, prescale_factor, postscale_factor, process_set,
                   ignore_name_scope, label):
    if not isinstance(device_dense, str | None):
        raise TypeError(f"the second parameter is `device_dense`, a str, not {device_dense!r:.100}: write op= or "
                        "process_set=")
    if op not in (Average, Sum):
        raise tf.errors.AbortedError(None, None, rules.SCATTER_OPS_ONLY)
    return _compressed(compression, collective_ops.reducescatter, tensors, name, op, prescale_factor, postscale_factor,
                       registered_id(process_set), ignore_name_scope, label=label)


@form_of(rules.reducescatter, _DIFFERENTIABLE, ignore_name_scope=_SCOPE, **_OF_SLICES)
def reducescatter(tensor: Tensorlike, device_dense: str = "", compression: type[Compressor] = Compression.none,
                  op: int = Average, name: str | None = None, process_set: ProcessSet = global_process_set,
                  ignore_name_scope: bool = False, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> tf.Tensor:
    return _reducescatter([tensor], device_dense, compression, name, op, prescale_factor, postscale_factor, process_set,
                          ignore_name_scope, "HorovodReducescatter")[0]


@form_of(rules.grouped_reducescatter, _DIFFERENTIABLE + _LIST, **_OF_SLICES)
def grouped_reducescatter(tensors: Sequence[Tensorlike], device_dense: str = "",
                          compression: type[Compressor] = Compression.none, op: int = Average,
                          process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0) -> list[tf.Tensor]:
    tensors = rules.listed(tensors)
    if not tensors:
        return tensors
    return _reducescatter(tensors, device_dense, compression, None, op, prescale_factor, postscale_factor, process_set,
                          False, "HorovodGroupedReducescatter")


# ------------------------------------------------------------------------------------- join, barrier and numbers ----


_join_views: dict[int, TensorView] = {}


def _wait_for_join():
    view = _join_views.pop(0)
    ffi.cast("int32_t *", view.dst)[0] = rules.join().wait()


# An op that only posted a join would leave out what the rules do around it, for example that Reducers agree anew.
_joining = Bridge(_join_views.__setitem__, _wait_for_join)


@form_of(rules.join, "The result is an int32 scalar tensor.")
def join() -> tf.Tensor:
    with collective_ops.in_turn():
        return _joining.exchange([tf.zeros([], tf.int32)], in_turn=True)[0]


@form_of(rules.barrier, "In a graph: the Operation that blocks.")
def barrier(process_set: ProcessSet = global_process_set) -> tf.Operation | None:
    return collective_ops.barrier(registered_id(process_set))


@public
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The size of a process set when the graph runs, an int32 scalar; an elastic job may change it.

    Args:
        process_set_id: of the set. name: of the op.
    Raises:
        ValueError: there is no such set. When the graph runs: tf.errors.InvalidArgumentError: the set no longer exists;
            tf.errors.FailedPreconditionError: before init().
    """
    check_registered(process_set_id, f"process set {process_set_id}")
    return collective_ops.fact("size", process_set_id, name)


@as_written
def rank_op(name: str | None = None) -> tf.Tensor:
    """This rank's number when the graph runs, an int32 scalar; tf.errors.FailedPreconditionError before init().

    name: of the op.
    """
    return collective_ops.fact("rank", 0, name)


@as_written
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """The rank on this host when the graph runs, an int32 scalar; tf.errors.FailedPreconditionError before init().

    name: of the op.
    """
    return collective_ops.fact("local_rank", 0, name)


@as_written
def local_size_op(name: str | None = None) -> tf.Tensor:
    """The host's number of ranks when the graph runs, an int32 scalar; tf.errors.FailedPreconditionError before init().

    name: of the op.
    """
    return collective_ops.fact("local_size", 0, name)


@public
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this rank is in the set, else 0; -1 before init(), -3 if there is no such set. An int32 scalar.

    process_set_id: of the set. name: of the op.
    """
    return collective_ops.fact("process_set_included", process_set_id, name)
