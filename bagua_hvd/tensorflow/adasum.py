"""Adasum as an optimizer of tf.compat.v1: what the ranks combine is not gradients but the steps they took.

    d_i = optimizer's step(s) of rank i, from common weights w        w <- w + Adasum(d_0, ..., d_{n-1})
"""
from typing import Any

import tensorflow as tf

from bagua_hvd.core.identity import ByIdentity
from bagua_hvd.job.basics import Adasum
from bagua_hvd.reduction.options import GradientOptions
from bagua_hvd.tensorflow.mpi_ops import grouped_allreduce
from bagua_hvd.tensorflow.optimizer_v1 import WrappedV1
from bagua_hvd.tensorflow.variables import native_variable


def _initialized(variable):
    """A variable's value, for the initial value of another one: in a graph, it may not be initialized before that."""
    if tf.executing_eagerly():
        return variable
    value = tf.cond(
        tf.compat.v1.is_variable_initialized(variable), variable.read_value, lambda: tf.identity(variable.initial_value)
    )
    # What is read of a reference variable is its memory, which the optimizer writes.
    return tf.raw_ops.DeepCopy(x=value)


class DistributedAdasum(WrappedV1):
    """Every rank steps on its own; after every n-th step the steps since the last time are combined.

    Args:
        options: GradientOptions; compression and process_set count. passes: n.
    """

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool, options: GradientOptions,
                 passes: int) -> None:
        super().__init__(optimizer, name, use_locking)
        self._options = options
        self._passes = passes
        self._counter: tf.Variable | None = None
        self._starts = ByIdentity(native_variable)      # by variable: the weights after the last combination

    def _counter_and_starts(self, variables):
        # Outside of a function that is being traced: its variables are made once.
        with tf.init_scope():
            if self._counter is None:
                self._counter = tf.compat.v1.Variable(0, trainable=False, use_resource=True, name="adasum_passes")
            for variable in variables:
                if variable not in self._starts:
                    self._starts[variable] = tf.compat.v1.Variable(
                        _initialized(variable), trainable=False, use_resource=True, name="adasum_start"
                    )
        return self._counter, [self._starts[variable] for variable in variables]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        grads_and_vars = list(grads_and_vars)
        variables = [variable for gradient, variable in grads_and_vars if gradient is not None]
        counter, starts = self._counter_and_starts(variables)
        stepped = super().apply_gradients(grads_and_vars, *args, **kwargs)
        if not self._options.communicates:
            return stepped
        with tf.control_dependencies([] if stepped is None else [stepped]):
            count = tf.identity(counter.assign_add(1))

        def combine():
            with tf.control_dependencies([count]):
                before = [start.read_value() for start in starts]
                steps = [variable.read_value() - start for variable, start in zip(variables, before, strict=True)]
            combined = grouped_allreduce(steps, op=Adasum, compression=self._options.compression)
            assigned = []
            for variable, start, old, step in zip(variables, starts, before, combined, strict=True):
                assigned += [tf.identity(variable.assign(old + step)), tf.identity(start.assign(old + step))]
            with tf.control_dependencies(assigned):
                return tf.constant(True)

        return tf.cond(tf.equal(count % self._passes, 0), combine, lambda: tf.constant(False))
