"""Elastic training for TensorFlow: `@hvd.elastic.run` around a function of a state. The loop is in job/elastic.py.

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0)

    @hvd.elastic.run
    def train(state): ...       # commit() after every few batches; starts where the state says
"""
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from bagua_hvd._keras.elastic import KerasState, broadcast_object
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job import basics
from bagua_hvd.job.elastic import ObjectState, runs
from bagua_hvd.reduction.agreement import share_numbers
from bagua_hvd.tensorflow.bridge import take_interruption
from bagua_hvd.tensorflow.functions import broadcast_, broadcast_variables

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

SEES_NO_STEPS = (
    "TensorFlowState(every_step=True) cannot keep every step: it sees variables, and not when a step has changed them. "
    "Use TensorFlowKerasState with a DistributedOptimizer; or leave out every_step and call commit()"
)

_OPERATION = re.compile("Horovod(Allreduce|Allgather|Broadcast)")


@contextmanager
def translated_errors() -> Iterator[None]:
    """Within it, a TensorFlow error caused by a lost rank or a shutdown becomes a HorovodInternalError, and one caused
    by a change of hosts a HostsUpdatedInterrupt.

    The class of TensorFlow's error depends on how the step runs (UnknownError, InternalError from programs compiled by
    XLA), so the runtime's state decides. An UnknownError that names one of Horovod's operations is always translated.
    """

    try:
        yield
    except tf.errors.OpError as error:
        try:
            basics.context().check()
        except Exception as failure:
            raise failure from error
        interruption = take_interruption()
        if interruption is not None:
            raise interruption from error
        if isinstance(error, tf.errors.UnknownError) and _OPERATION.search(error.message):
            lost, first = HorovodInternalError(error.message), basics.context().first_loss()
            lost.rank, lost.cause = first.rank, first.cause
            raise lost from error
        raise


run = runs(__name__, translated_errors)


class TensorFlowKerasState(KerasState):
    """A KerasState. every_step needs a DistributedOptimizer, because a tape does not see when weights change.

    backend: unused, for compatibility with Horovod.
    """

    def __init__(self, model: "tf.keras.Model", optimizer: "tf.keras.optimizers.Optimizer | None" = None,
                 backend: Any = None, *, every_step: bool = False, **kwargs: Any) -> None:
        super().__init__(model, optimizer, every_step=every_step, **kwargs)


class TensorFlowState(ObjectState):
    """Variables and other training state, as attributes.

    Args:
        variables: None for all global variables (tf.compat.v1). session: for graphs of tf.compat.v1; None: eager mode.
        every_step: not supported; True raises ValueError.
        kwargs: further attributes with their initial values; they are pickled.
    """

    def __init__(self, variables: Sequence[tf.Variable] | None = None, session: tf.compat.v1.Session | None = None, *,
                 every_step: bool = False, **kwargs: Any) -> None:
        if every_step:
            raise ValueError(SEES_NO_STEPS)
        self.variables = list(variables or tf.compat.v1.global_variables())
        self.session = session
        if session is not None:
            # Placeholders, assignments and broadcast are made now, because training may finalize the graph.
            with session.graph.as_default():
                self._placeholders = [tf.compat.v1.placeholder(v.dtype.base_dtype, v.shape) for v in self.variables]
                self._assignments = [v.assign(p).op for v, p in zip(self.variables, self._placeholders, strict=True)]
                self._broadcast = broadcast_variables(self.variables, 0)
        self._saved_values = self._read()
        super().__init__(broadcast_object, basics.rank, **kwargs)

    def _read(self):
        if self.session is not None:
            return self.session.run(self.variables)
        return [variable.numpy() for variable in self.variables]

    def _write(self, values):
        if self.session is not None:
            self.session.run(self._assignments, dict(zip(self._placeholders, values, strict=True)))
            return
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)

    def save(self) -> None:
        self._saved_values = self._read()
        super().save()

    def restore(self) -> None:
        self._write(self._saved_values)
        super().restore()

    def sync(self) -> None:
        with translated_errors():
            if self.session is None:
                broadcast_(self.variables, root_rank=0)
            else:
                self.session.run(self._broadcast)
        share_numbers((), broadcast_object)
        super().sync()
