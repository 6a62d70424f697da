"""Elastic training for TensorFlow: `@hvd.elastic.run` around a function of a state. The loop is in common/elastic.py.

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0)

    @hvd.elastic.run
    def train(state): ...       # commit() after every few batches; begins where the state says
"""
import functools

import tensorflow as tf

from bagua_hvd.common import basics
from bagua_hvd.common.elastic import ObjectState, reset, run_fn
from bagua_hvd.tensorflow.functions import broadcast_object, broadcast_variables

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


def run(func):
    """Decorator: `func` goes on when ranks are lost or the hosts change.

    Before the first call of `func` and after every change, the state is synchronized from rank 0. No collective may be
    called before that: ranks that join later begin there.

    Args:
        func: function whose first argument is the state, such as a TensorFlowKerasState.
    Returns:
        A function with the same arguments and result. Exceptions other than HorovodInternalError,
        HostsUpdatedInterrupt, and the errors of TensorFlow that a lost rank causes pass through it.
    """

    @functools.wraps(func)
    def translated(state, *args, **kwargs):
        with translated_errors():
            return func(state, *args, **kwargs)

    return run_fn(translated, reset)


class translated_errors:
    """Within it, an error of TensorFlow that comes of a lost rank or a shutdown is a HorovodInternalError.

    Which class TensorFlow gives the error depends on how the step runs (UnknownError, InternalError from programs
    compiled by XLA), so what decides is the runtime: whether it can go on.
    """

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, tf.errors.OpError):
            try:
                basics.context().check()
            except Exception as failure:
                raise failure from error


class _VariablesState(ObjectState):
    """Variables, saved as arrays and sent as tensors, besides attributes that are pickled."""

    def __init__(self, **kwargs):
        # A name of its own, apart from what the script broadcasts.
        super().__init__(
            bcast_object=functools.partial(broadcast_object, name="elastic.state"), get_rank=basics.rank, **kwargs
        )

    def _variables(self):
        """All variables of the state, by name of what they belong to."""
        raise NotImplementedError

    def _read(self, variables):
        return [variable.numpy() for variable in variables]

    def _write(self, variables, values):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def _broadcast(self, variables):
        broadcast_variables(variables, root_rank=0)

    def save(self):
        self._saved = {name: self._read(variables) for name, variables in self._variables().items()}
        super().save()

    def restore(self):
        if hasattr(self, "_saved"):
            for name, variables in self._variables().items():
                # Slots that were made after the last save stay as they are.
                count = len(self._saved[name])
                self._write(variables[:count], self._saved[name])
        super().restore()

    def sync(self):
        with translated_errors():
            for variables in self._variables().values():
                self._broadcast(variables)
        self.save()
        super().sync()


class TensorFlowKerasState(_VariablesState):
    """Keras model and optimizer, and whatever else training needs in order to go on, as attributes.

    Args:
        model: a built Keras model. optimizer: None for the model's own. backend: for Horovod's sake.
        kwargs: further attributes with their first values; they are pickled.
    Raises:
        ValueError: the model is not built: its variables do not exist yet.
    """

    def __init__(self, model, optimizer=None, backend=None, **kwargs):
        if not model.built:
            raise ValueError(
                "the model is not built, so its variables do not exist yet: call model.build(input_shape), or the "
                "model on some data, first"
            )
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        if self.optimizer is not None and not getattr(self.optimizer, "built", True):
            self.optimizer.build(model.trainable_variables)
        super().__init__(**kwargs)
        self.save()

    def _variables(self):
        optimizer = self.optimizer.variables if self.optimizer is not None else []
        return {"model": list(self.model.variables), "optimizer": list(optimizer)}


class TensorFlowState(_VariablesState):
    """Variables, and whatever else training needs in order to go on, as attributes.

    Args:
        variables: None for all global variables (tf.compat.v1). session: for graphs of tf.compat.v1; None: eager mode.
        kwargs: further attributes with their first values; they are pickled.
    """

    def __init__(self, variables=None, session=None, **kwargs):
        self.variables = list(variables or tf.compat.v1.global_variables())
        self.session = session
        self._operations = None
        super().__init__(**kwargs)
        self.save()

    def _variables(self):
        return {"variables": self.variables}

    def _graph_operations(self):
        """(placeholders, assignments, broadcast), made once."""
        if self._operations is None:
            with self.session.graph.as_default():
                placeholders = [tf.compat.v1.placeholder(v.dtype.base_dtype, v.shape) for v in self.variables]
                assignments = [v.assign(p).op for v, p in zip(self.variables, placeholders, strict=True)]
                self._operations = placeholders, assignments, broadcast_variables(self.variables, 0)
        return self._operations

    def _read(self, variables):
        return super()._read(variables) if self.session is None else self.session.run(variables)

    def _write(self, variables, values):
        if self.session is None:
            super()._write(variables, values)
        else:
            placeholders, assignments, _ = self._graph_operations()
            self.session.run(assignments, dict(zip(placeholders, values, strict=True)))

    def _broadcast(self, variables):
        if self.session is None:
            super()._broadcast(variables)
        else:
            self.session.run(self._graph_operations()[2])
