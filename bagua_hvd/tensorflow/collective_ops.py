"""The collectives over lists of dense tensors, with their gradients: in eager mode, in graphs, and compiled by XLA.

mpi_ops.py checks arguments, as far as the core does not. Names: ranks match operations by them. In eager mode an
unnamed operation has the name of its kind, since calls follow one another; in a graph it is named after its tensor,
within the name scope, like the graph's own ops.
"""
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from bagua_hvd.collectives.arguments import check_name
from bagua_hvd.core import native
from bagua_hvd.job import basics
from bagua_hvd.job.basics import Average, Sum
from bagua_hvd.tensorflow import xla
from bagua_hvd.tensorflow.graphs import compiled_by_xla, run_independently
from bagua_hvd.tensorflow.native_ops import ops

_NO_XLA = (
    "the output shape of {kind} is known only at run time, which XLA does not support: use jit_compile=False"
)
# With XLA, ranks are assumed to have equal first dimensions; if they differ, the step fails.

_WITH_GRAPHS = {"If", "Case", "While", "StatefulPartitionedCall"}


def _names(label, name, tensor, ignore_name_scope):
    """The name of the operation, and that of the node in the graph."""
    check_name(name)
    if tf.executing_eagerly():
        return name or label, None
    # TensorFlow names captured tensors by a number that depends on everything the process did before.
    is_named = tensor is not None and not tensor.name.partition(":")[0].isdigit()
    name = name or (f"{label}_{re.sub('[^a-zA-Z0-9_]', '_', tensor.name)}" if is_named else label)
    node_name = re.sub("[^a-zA-Z0-9_./-]", "_", name)
    if ignore_name_scope:
        return name, node_name
    # In a program compiled by XLA no node takes the name, so it must be marked as used.
    return tf.compat.v1.get_default_graph().unique_name(node_name, mark_as_used=compiled_by_xla()), node_name


def _run(function, names, **arguments):
    """Adds the op to the graph, or runs it now, on the calling thread."""
    tensor_name, node_name = names
    outputs = function(tensor_name=tensor_name, blocking=tf.executing_eagerly(), name=node_name, **arguments)
    run_independently(outputs[0] if isinstance(outputs, (list, tuple)) else outputs)
    return outputs


def _compiled(kind, gradient, tensors, shapes, name, attributes):
    """Like _run(), in a program compiled by XLA; gradient(name, attributes, inputs, gradients)."""

    @tf.custom_gradient
    def call(*tensors):
        outputs = xla.collective(kind, tensors, shapes, name, **attributes)
        return outputs, lambda *gradients: gradient(name, attributes, tensors, filled(outputs, gradients))

    return list(call(*tensors))


def _register(op_type, attribute_names, gradient):
    """Registers gradient(name, attributes, inputs, gradients) for the op."""

    @tf.RegisterGradient(op_type)
    def registered(op, *gradients):
        attributes = {name: op.get_attr(name) for name in attribute_names}
        return gradient(op.get_attr("tensor_name").decode(), attributes, op.inputs, filled(op.outputs, gradients))


def filled(outputs, gradients):
    """The gradients, with zeros for unused outputs: every rank communicates all of them."""
    return [
        tf.zeros_like(tensor) if gradient is None else tf.convert_to_tensor(gradient)
        for tensor, gradient in zip(outputs, gradients, strict=True)
    ]


def fact(name: str, process_set_id: int = 0, node_name: str | None = None) -> Any:
    """A number of the job as an int32 scalar, read when the graph runs; see native/tensorflow/collective_ops.c."""
    if compiled_by_xla():
        return xla.fact(name, process_set_id)
    return ops.bagua_hvd_fact(fact=name, process_set_id=process_set_id, name=node_name)


# ---------------------------------------------------------------------------------------------------- allreduce ----


def allreduce(tensors: Sequence[tf.Tensor], name: str | None, op: int, prescale_factor: float, postscale_factor: float,
              process_set_id: int, ignore_name_scope: bool = False, label: str = "HorovodAllreduce") -> Any:
    """The reduced tensors; several form one operation."""
    names = _names(label, name, tensors[0], ignore_name_scope)
    attributes = {"op": op, "prescale_factor": float(prescale_factor), "postscale_factor": float(postscale_factor),
                  "process_set_id": process_set_id}
    if compiled_by_xla():
        shapes = [tensor.shape for tensor in tensors]
        return _compiled(native.ALLREDUCE, _allreduce_gradient, tensors, shapes, names[0], attributes)
    return _run(ops.bagua_hvd_allreduce, names, tensors=tensors, **attributes)


def _allreduce_gradient(name, attributes, inputs, gradients):
    """The allreduce of the gradients with the same op and factors."""
    return allreduce(gradients, f"{name}_gradient", **attributes)


_REDUCTION = ("op", "prescale_factor", "postscale_factor", "process_set_id")
_register("BaguaHvdAllreduce", _REDUCTION, _allreduce_gradient)


def _averaged(name, gradients, process_set_id):
    return allreduce(gradients, f"{name}_gradient", Average, 1.0, 1.0, process_set_id)


# ---------------------------------------------------------------------------------------------------- allgather ----


def allgather(tensors: Sequence[tf.Tensor], name: str | None, process_set_id: int, ignore_name_scope: bool = False,
              label: str = "HorovodAllgather") -> Any:
    """The concatenated tensors of all ranks; several form one operation."""
    names = _names(label, name, tensors[0], ignore_name_scope)
    if compiled_by_xla():
        size = basics.context().process_set_size(process_set_id)
        shapes = [[size * dim for dim in shape[:1]] + shape[1:] for shape in map(xla.static_shape, tensors)]
        return _compiled(native.ALLGATHER, _compiled_allgather_gradient, tensors, shapes, names[0],
                         {"process_set_id": process_set_id})
    return _run(ops.bagua_hvd_allgather, names, tensors=tensors, process_set_id=process_set_id)


def _allgather_gradient(name, attributes, inputs, gradients):
    """This rank's slices of the averaged gradients."""
    process_set_id = attributes["process_set_id"]
    reduced = _averaged(name, gradients, process_set_id)
    rows = [tf.shape(tensor)[0] for tensor in inputs]
    by_rank = allgather([tf.expand_dims(tf.stack(rows), 0)], f"{name}_gradient_rows", process_set_id)[0]
    begins = tf.reduce_sum(by_rank[:fact("process_set_rank", process_set_id)], axis=0)
    return [tensor[begins[i]:begins[i] + count] for i, (tensor, count) in enumerate(zip(reduced, rows, strict=True))]


_register("BaguaHvdAllgather", ("process_set_id",), _allgather_gradient)


def _compiled_allgather_gradient(name, attributes, inputs, gradients):
    reduced = _averaged(name, gradients, attributes["process_set_id"])
    rank = fact("process_set_rank", attributes["process_set_id"])
    return [
        tf.slice(tensor, tf.stack([rank * part.shape[0], *[0] * (len(part.shape) - 1)]), part.shape)
        for tensor, part in zip(reduced, inputs, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------- broadcast ----


def broadcast(tensors: Sequence[tf.Tensor], root_rank: int, name: str | None, process_set_id: int,
              ignore_name_scope: bool = False, label: str = "HorovodBroadcast") -> Any:
    """The root's tensors; several form one operation. ValueError: root_rank is out of range."""
    if isinstance(root_rank, (int, np.integer)) and not 0 <= root_rank < 2**31:      # the ops read its lower 32 bits
        raise ValueError(f"broadcast received invalid root rank {root_rank}")
    names = _names(label, name, tensors[0], ignore_name_scope)
    attributes = {"root_rank": root_rank, "process_set_id": process_set_id}
    if compiled_by_xla():
        shapes = [tensor.shape for tensor in tensors]
        return _compiled(native.BROADCAST, _broadcast_gradient, tensors, shapes, names[0], attributes)
    return _run(ops.bagua_hvd_broadcast, names, tensors=tensors, **attributes)


def _broadcast_gradient(name, attributes, inputs, gradients):
    """The averaged gradients on the root, zeros elsewhere."""
    reduced = _averaged(name, gradients, attributes["process_set_id"])
    is_root = tf.equal(fact("rank"), attributes["root_rank"])
    return [tf.where(is_root, tensor, tf.zeros_like(tensor)) for tensor in reduced]


_register("BaguaHvdBroadcast", ("root_rank", "process_set_id"), _broadcast_gradient)


# ----------------------------------------------------------------------------------------------------- alltoall ----


def alltoall(tensor: tf.Tensor, splits: Any, name: str | None, process_set_id: int,
             ignore_name_scope: bool = False) -> Any:
    """(output, received splits). splits: an int32 tensor, or None for an even split."""
    names = _names("HorovodAlltoall", name, tensor, ignore_name_scope)
    even = splits is None
    if compiled_by_xla():
        if not even:
            raise NotImplementedError(_NO_XLA.format(kind="alltoall with splits"))
        size = basics.context().process_set_size(process_set_id)
        output = _compiled(native.ALLTOALL, _compiled_alltoall_gradient, [tensor], [tensor.shape], names[0],
                           {"process_set_id": process_set_id})[0]
        return output, tf.fill([size], tf.constant(0 if tensor.shape.rank == 0 else tensor.shape[0] // size))
    return _run(ops.bagua_hvd_alltoall, names, tensor=tensor, splits=tf.zeros([0], tf.int32) if even else splits,
                even=even, process_set_id=process_set_id)


@tf.RegisterGradient("BaguaHvdAlltoall")
def _alltoall_gradient(op, gradient, _):
    """The alltoall of the gradient by the received splits; zeros for rows that were not sent."""
    name, process_set_id = op.get_attr("tensor_name").decode(), op.get_attr("process_set_id")
    if gradient is None:
        gradient = tf.zeros_like(op.outputs[0])
    returned, _ = alltoall(gradient, op.outputs[1], f"{name}_gradient", process_set_id)
    shape = tf.shape(op.inputs[0])
    missing = tf.concat([shape[:1] - tf.shape(returned)[:1], shape[1:]], 0)
    return tf.concat([returned, tf.zeros(missing, returned.dtype)], 0), None


def _compiled_alltoall_gradient(name, attributes, inputs, gradients):
    return alltoall(gradients[0], None, f"{name}_gradient", attributes["process_set_id"])[0]


# ------------------------------------------------------------------------------------------------ reducescatter ----


def reducescatter(tensors: Sequence[tf.Tensor], name: str | None, op: int, prescale_factor: float,
                  postscale_factor: float, process_set_id: int, ignore_name_scope: bool = False,
                  label: str = "HorovodReducescatter") -> Any:
    """This rank's rows of the reduced tensors; several form one operation."""
    names = _names(label, name, tensors[0], ignore_name_scope)
    attributes = {"op": op, "prescale_factor": float(prescale_factor), "postscale_factor": float(postscale_factor),
                  "process_set_id": process_set_id}
    if compiled_by_xla():
        shapes = [_own_shape(tensor, process_set_id) for tensor in tensors]
        return _compiled(native.REDUCESCATTER, _compiled_reducescatter_gradient, tensors, shapes, names[0],
                         attributes)
    return _run(ops.bagua_hvd_reducescatter, names, tensors=tensors, **attributes)


def _own_shape(tensor, process_set_id):
    """The shape of this rank's rows, with the current size and rank."""
    context = basics.context()
    size, rank = context.process_set_size(process_set_id), context.process_set_rank(process_set_id)
    return [rows // size + (rank < rows % size) if axis == 0 else rows
            for axis, rows in enumerate(xla.static_shape(tensor))]


def _compiled_reducescatter_gradient(name, attributes, inputs, gradients):
    size = basics.context().process_set_size(attributes["process_set_id"])
    if any(tensor.shape[0] % size for tensor in inputs):
        raise NotImplementedError(
            _NO_XLA.format(kind="the gradient of reducescatter, where the ranks' parts differ in size,"))
    return _reducescatter_gradient(name, attributes, inputs, gradients)


def _reducescatter_gradient(name, attributes, inputs, gradients):
    """The allgather of the gradients, times the size for Sum, times the factors: Horovod's convention."""
    process_set_id = attributes["process_set_id"]
    gathered = allgather(gradients, f"{name}_gradient", process_set_id)
    factor = attributes["prescale_factor"] * attributes["postscale_factor"]
    results = []
    for tensor in gathered:
        scaled = tensor * tf.cast(factor, tensor.dtype)
        if attributes["op"] == Sum:
            scaled *= tf.cast(fact("size", process_set_id), tensor.dtype)
        results.append(scaled)
    return results


_register("BaguaHvdReducescatter", _REDUCTION, _reducescatter_gradient)


# ------------------------------------------------------------------------------------------------------ barrier ----


def in_turn() -> Any:
    """Within it, ops run after all collectives traced before, including those in conditions, loops and calls."""
    graph, before = tf.compat.v1.get_default_graph(), []
    # In a graph of tf.compat.v1 a session may run this op without the others.
    if not tf.executing_eagerly() and hasattr(graph, "outer_graph"):
        before = [op for op in graph.get_operations() if op.type.startswith("BaguaHvd") or op.type in _WITH_GRAPHS]
    return tf.control_dependencies(before)


def barrier(process_set_id: int) -> Any:
    """None in eager mode, else the Operation that waits."""
    names = _names("HorovodBarrier", None, None, True)
    if compiled_by_xla():
        return xla.collective(native.BARRIER, [], [], names[0], process_set_id)[0].op
    with in_turn():
        return ops.bagua_hvd_barrier(tensor_name=names[0], blocking=tf.executing_eagerly(), name=names[1],
                                     process_set_id=process_set_id)


tf.no_gradient("BaguaHvdFact")
