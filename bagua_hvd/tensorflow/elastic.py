"""Elastic training for TensorFlow: `@hvd.elastic.run` around a function of a state; the loop is common/elastic.py."""
import functools

import tensorflow as tf

from bagua_hvd._keras import values
from bagua_hvd._keras.elastic import KerasState
from bagua_hvd.common import basics, objects
from bagua_hvd.common.elastic import ObjectState, reset, run_fn
from bagua_hvd.common.exceptions import HorovodInternalError


def convert_errors(func):
    """`func`, whose failed collectives raise HorovodInternalError instead of what TensorFlow makes of them."""

    @functools.wraps(func)
    def converting(*args, **kwargs):
        try:
            return func(*args, **kwargs)
        except tf.errors.OpError as error:
            # A lost rank fails every operation, so the core itself knows whether this error is its own.
            try:
                basics.context().check()
            except HorovodInternalError as failure:
                raise failure from error
            raise

    return converting


def run(func):
    """Decorator: `func` goes on when ranks are lost or the hosts change.

    Before the first call of `func` and after every change, the state is synchronized from rank 0. No collective may be
    called before that: ranks that join later begin there.

    Args:
        func: function whose first argument is the state, such as a TensorFlowKerasState.
    """
    return run_fn(convert_errors(func), reset)


class TensorFlowKerasState(KerasState):
    __doc__ = KerasState.__doc__

    def __init__(self, model, optimizer=None, backend=None, **kwargs):
        # backend: Keras' session functions, in Horovod; Keras 3 has no sessions.
        super().__init__(model, optimizer, **kwargs)


class TensorFlowState(ObjectState):
    """Variables and whatever else training needs in order to go on, as attributes.

    Args:
        variables: None: all global variables (of a graph in TensorFlow 1's way).
        session: the tf.compat.v1.Session in which they live; None: eager variables.
        kwargs: further attributes with their first values; see ObjectState.
    """

    def __init__(self, variables=None, session=None, **kwargs):
        self.variables = list(variables or tf.compat.v1.global_variables())
        self.session = session
        self._placeholders = None
        self._save_variables()

        def broadcast_object(obj):
            return objects.broadcast_object(basics.context(), obj, 0, basics.rank() == 0, "elastic.state")

        super().__init__(broadcast_object, basics.rank, **kwargs)

    def _values(self):
        if self.session is not None:
            return self.session.run(self.variables)
        return [variable.numpy() for variable in self.variables]

    def _assign(self, arrays):
        for variable, array in zip(self.variables, arrays, strict=True):
            if self.session is not None:
                variable.load(array, self.session)
            else:
                variable.assign(array)

    def _save_variables(self):
        self._saved_values = [array.copy() for array in self._values()]

    def save(self):
        self._save_variables()
        super().save()

    def restore(self):
        self._assign(self._saved_values)
        super().restore()

    def sync(self):
        self._assign([
            values.broadcast(array, 0, f"elastic.state.variables.{i}") for i, array in enumerate(self._values())
        ])
        self._save_variables()
        super().sync()
