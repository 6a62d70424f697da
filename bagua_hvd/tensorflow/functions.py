"""Broadcasts variables and Python objects; gathers objects."""
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from bagua_hvd.collectives import objects
from bagua_hvd.core.util import doc_from
from bagua_hvd.job.process_sets import ProcessSet, global_process_set, registered_id
from bagua_hvd.tensorflow import collective_ops
from bagua_hvd.tensorflow.graphs import as_written, native_variable, public
from bagua_hvd.tensorflow.native_ops import DTYPES, from_wire, to_wire
from bagua_hvd.training.model import weights_broadcast

_AT_ONCE = "Runs at once, in graphs too."
_SESSION = "unused, for compatibility with Horovod."


@public
def broadcast_(variables: Iterable[tf.Variable], root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> list[tf.Tensor]:
    """Overwrites the variables with those of the root, as one operation.

    Args:
        variables: a list of tf.Variable (all resource variables, or all reference variables) or of Keras variables;
            same shapes and dtypes, in the same order, on all ranks.
        root_rank: global rank. name: ranks match operations by it. process_set: the ranks taking part.
    Returns:
        The new values, a list of tensors.
    Raises:
        ValueError: both kinds of variables, or a dtype that cannot be sent; strings are left unchanged. TypeError: an
            entry is not a variable.
        tf.errors.FailedPreconditionError: ranks disagree about the variables.
        tf.errors.InvalidArgumentError: the root is not in the set. tf.errors.UnknownError: a rank was lost.
    """
    variables = [native_variable(variable) for variable in variables]
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise TypeError(f"broadcast_ takes variables, not {type(variable).__name__}")
    if len({getattr(variable, "_in_graph_mode", None) is None for variable in variables}) > 1:
        raise ValueError("broadcast_ takes resource variables or reference variables, but not both in one call")
    values = [tf.convert_to_tensor(variable) for variable in variables]
    numbers = [index for index, value in enumerate(values) if value.dtype != tf.string]
    if not numbers:
        return values
    wire_tensors = [to_wire(values[index]) for index in numbers]
    for index, tensor in zip(numbers, wire_tensors, strict=True):
        if tensor.dtype not in DTYPES:
            raise ValueError(f"variable {variables[index].name} cannot be broadcast: its dtype is {tensor.dtype.name}")
    received = collective_ops.broadcast(wire_tensors, root_rank, name, registered_id(process_set),
                                        label="HorovodBroadcastVariables")
    for index, value in zip(numbers, received, strict=True):
        values[index] = tf.convert_to_tensor(variables[index].assign(from_wire(value, values[index].dtype)))
    return values


@public
def broadcast_variables(variables: Iterable[tf.Variable], root_rank: int,
                        process_set: ProcessSet = global_process_set, inplace: bool = False) -> tf.Operation | None:
    """Gives every rank the root's values.

    Args:
        variables: a list of variables, the same on all ranks; see broadcast_().
        root_rank: global rank. process_set: the ranks taking part. inplace: unused, for compatibility with Horovod: it
            is always in place.
    Returns:
        None in eager mode, where the broadcast is done on return; else its operation.
    Raises:
        As broadcast_().
    """
    values = broadcast_(list(variables), root_rank, process_set=process_set)
    if not tf.executing_eagerly():
        return tf.group(*(value.op for value in values))
    weights_broadcast(process_set)
    return None


@as_written
def broadcast_global_variables(root_rank: int) -> tf.Operation | None:
    """The operation that gives every rank the root's values of all variables of the default graph (tf.compat.v1).

    Args:
        root_rank: global rank.
    Raises:
        RuntimeError: in eager mode, where there is no list of all variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "bagua_hvd.tensorflow.broadcast_global_variables() does not support eager execution: use "
            "broadcast_variables(model.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcasts all variables once the session exists, so that all ranks start with the root's.

    Args:
        root_rank: global rank. device: unused, for compatibility with Horovod.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self._broadcast: Any = None

    def begin(self) -> None:
        if self._broadcast is None or self._broadcast.graph is not tf.compat.v1.get_default_graph():
            self._broadcast = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: tf.compat.v1.Session, coord: tf.train.Coordinator) -> None:
        session.run(self._broadcast)


@doc_from(objects.broadcast_object, _AT_ONCE, session=_SESSION)
def broadcast_object(obj: Any, root_rank: int = 0, session: tf.compat.v1.Session | None = None,
                     name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    return objects.broadcast_object(obj, root_rank, name, process_set)


@doc_from(objects.broadcast_object, "A function of `obj` that does as follows with these arguments.", session=_SESSION)
def broadcast_object_fn(root_rank: int = 0, session: tf.compat.v1.Session | None = None, name: str | None = None,
                        process_set: ProcessSet = global_process_set) -> Callable[[Any], Any]:
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@doc_from(objects.allgather_object, _AT_ONCE, process_set="the ranks taking part.", session=_SESSION)
def allgather_object(obj: Any, session: tf.compat.v1.Session | None = None, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> list:
    return objects.allgather_object(obj, name, process_set)
