"""The collectives over TensorFlow's tensors, in all of Horovod's forms. The rules are in common/collectives.py.

Here is what only TensorFlow has: IndexedSlices, numbers of the job as ops, name scopes. All of them serve eager code,
tf.function, sessions of tf.compat.v1, and functions compiled by XLA (docs/decisions/0010-collectives-in-xla.md).
"""
import tensorflow as tf

from bagua_hvd.common import basics, collectives
from bagua_hvd.common.basics import (  # noqa: F401  (the surface of this module)
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from bagua_hvd.common.collectives import handle_average_backwards_compatibility, registered_id
from bagua_hvd.common.process_sets import global_process_set
from bagua_hvd.common.util import num_rank_is_power_2
from bagua_hvd.tensorflow import collective_ops
from bagua_hvd.tensorflow.compression import Compression
from bagua_hvd.tensorflow.graphs import as_written, form_of

_resolve = handle_average_backwards_compatibility
_DIFFERENTIABLE = "Differentiable. In a graph: the tensor that will hold the result."
_COMPRESSED = _DIFFERENTIABLE + " `compression` is applied before and undone after; device_* are for Horovod's sake."
_SPARSE = (
    _COMPRESSED + " tf.IndexedSlices are gathered, duplicates kept: with op Sum or Average and without factors, else "
    "NotImplementedError."
)


@as_written
def _check_op(op, process_set_id):
    collectives.check_op(op, process_set_id, basics.runtime.context)
    return op


def _dense(tensor):
    return tf.convert_to_tensor(tensor)


# ---------------------------------------------------------------------------------------------------- allreduce ----


def _divided(values, divisor):
    """Of the same dtype; integers are truncated towards zero, as the core does it."""
    if values.dtype.is_integer:
        return tf.cast(tf.truncatediv(tf.cast(values, tf.int64), tf.cast(divisor, tf.int64)), values.dtype)
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


@form_of(collectives.allreduce, _SPARSE)
def allreduce(tensor, average=None, device_dense="", device_sparse="", compression=Compression.none, op=None,
              prescale_factor=1.0, postscale_factor=1.0, name=None, process_set=global_process_set,
              ignore_name_scope=False):
    op = _resolve(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        return _sparse_allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set, ignore_name_scope)
    id = registered_id(process_set)
    compressed, context = compression.compress(_dense(tensor))
    reduced = collective_ops.allreduce([compressed], name, _check_op(op, id), prescale_factor, postscale_factor, id,
                                       ignore_name_scope)[0]
    return compression.decompress(reduced, context)


@form_of(collectives.grouped_allreduce, _SPARSE + " Returns a list; an empty one as it is.")
def grouped_allreduce(tensors, average=None, device_dense="", device_sparse="", compression=Compression.none, op=None,
                      prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set,
                      ignore_name_scope=False, name=None):
    if not tensors:
        return tensors
    op = _resolve(op, average)
    id = registered_id(process_set)
    results = [None] * len(tensors)
    pairs = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            results[index] = _sparse_allreduce(tensor, f"{name}.{index}" if name else None, op, prescale_factor,
                                               postscale_factor, process_set, ignore_name_scope)
        else:
            pairs[index] = compression.compress(_dense(tensor))
    if pairs:
        reduced = collective_ops.allreduce(
            [compressed for compressed, _ in pairs.values()], name, _check_op(op, id), prescale_factor,
            postscale_factor, id, ignore_name_scope, label="HorovodGroupedAllreduce",
        )
        for (index, (_, context)), tensor in zip(pairs.items(), reduced, strict=True):
            results[index] = compression.decompress(tensor, context)
    return results


# ------------------------------------------------------------------------------- allgather, broadcast, alltoall ----


@form_of(collectives.allgather, _DIFFERENTIABLE)
def allgather(tensor, name=None, ignore_name_scope=False, process_set=global_process_set):
    return collective_ops.allgather([_dense(tensor)], name, registered_id(process_set), ignore_name_scope)[0]


@form_of(collectives.grouped_allgather, _DIFFERENTIABLE + " Returns a list; an empty one as it is.")
def grouped_allgather(tensors, name=None, ignore_name_scope=False, process_set=global_process_set):
    if not tensors:
        return tensors
    return collective_ops.allgather([_dense(tensor) for tensor in tensors], name, registered_id(process_set),
                                    ignore_name_scope, label="HorovodGroupedAllgather")


@form_of(collectives.broadcast, _DIFFERENTIABLE)
def broadcast(tensor, root_rank, name=None, ignore_name_scope=False, process_set=global_process_set):
    return collective_ops.broadcast([_dense(tensor)], root_rank, name, registered_id(process_set),
                                    ignore_name_scope)[0]


def _int32_splits(splits):
    if isinstance(splits, (list, tuple)):
        return tf.constant(splits, tf.int32)
    splits = tf.convert_to_tensor(splits)
    if splits.dtype != tf.int32:
        raise tf.errors.InvalidArgumentError(
            None, None, f"alltoall expects 32-bit integer splits, not {splits.dtype.name}."
        )
    return splits


@form_of(collectives.alltoall, _DIFFERENTIABLE + " Without `splits` the output alone.")
def alltoall(tensor, splits=None, name=None, ignore_name_scope=False, process_set=global_process_set):
    rows = _int32_splits(splits) if splits is not None else None
    output, received = collective_ops.alltoall(_dense(tensor), rows, name, registered_id(process_set),
                                               ignore_name_scope)
    return output if splits is None else (output, received)


# ------------------------------------------------------------------------------------------------ reducescatter ----


@as_written
def _check_scatter_op(op):
    if op not in (Average, Sum):
        raise tf.errors.AbortedError(None, None, collectives.SCATTER_OPS_ONLY)
    return op


@form_of(collectives.reducescatter, _COMPRESSED)
def reducescatter(tensor, device_dense="", compression=Compression.none, op=Average, name=None,
                  process_set=global_process_set, ignore_name_scope=False, prescale_factor=1.0, postscale_factor=1.0):
    compressed, context = compression.compress(_dense(tensor))
    reduced = collective_ops.reducescatter([compressed], name, _check_scatter_op(op), prescale_factor,
                                           postscale_factor, registered_id(process_set), ignore_name_scope)[0]
    return compression.decompress(reduced, context)


@form_of(collectives.grouped_reducescatter, _COMPRESSED + " Returns a list; an empty one as it is.")
def grouped_reducescatter(tensors, device_dense="", compression=Compression.none, op=Average,
                          process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0):
    if not tensors:
        return tensors
    pairs = [compression.compress(_dense(tensor)) for tensor in tensors]
    reduced = collective_ops.reducescatter(
        [compressed for compressed, _ in pairs], None, _check_scatter_op(op), prescale_factor, postscale_factor,
        registered_id(process_set), label="HorovodGroupedReducescatter",
    )
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


# ------------------------------------------------------------------------------------- join, barrier and numbers ----


@form_of(collectives.join, "The result is an int32 scalar tensor.")
def join():
    return collective_ops.join()


@form_of(collectives.barrier, "In a graph: the Operation that blocks.")
def barrier(process_set=global_process_set):
    return collective_ops.barrier(registered_id(process_set))


@as_written
def size_op(process_set_id=0, name=None):
    """The size of a process set when the graph runs, an int32 scalar; an elastic job may change it.

    Raises:
        tf.errors.FailedPreconditionError: before init(). tf.errors.InvalidArgumentError: there is no such set.
    """
    return collective_ops.fact("size", process_set_id, name)


@as_written
def rank_op(name=None):
    """This rank's number when the graph runs, an int32 scalar; tf.errors.FailedPreconditionError before init()."""
    return collective_ops.fact("rank", 0, name)


@as_written
def local_rank_op(name=None):
    """The number on the host when the graph runs, an int32 scalar; tf.errors.FailedPreconditionError before init()."""
    return collective_ops.fact("local_rank", 0, name)


@as_written
def local_size_op(name=None):
    """The ranks of this host when the graph runs, an int32 scalar; tf.errors.FailedPreconditionError before init()."""
    return collective_ops.fact("local_size", 0, name)


@as_written
def process_set_included_op(process_set_id=0, name=None):
    """1 when this rank is in the set, else 0; -1 before init(), -3 when there is no such set. An int32 scalar."""
    return collective_ops.fact("process_set_included", process_set_id, name)


def check_num_rank_power_of_2(num_rank):
    """Whether Adasum can run with this many ranks."""
    return num_rank_is_power_2(num_rank)
