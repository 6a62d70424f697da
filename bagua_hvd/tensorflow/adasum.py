"""Adasum as an optimizer of tf.compat.v1: combines the ranks' optimizer steps instead of their gradients.

    d_i = optimizer's step(s) of rank i, from common weights w        w <- w + Adasum(d_0, ..., d_{n-1})
"""
from typing import Any

import tensorflow as tf

from bagua_hvd.job.basics import Adasum
from bagua_hvd.reduction.options import GradientOptions
from bagua_hvd.tensorflow.mpi_ops import grouped_allreduce
from bagua_hvd.tensorflow.optimizer_v1 import WrappedV1
from bagua_hvd.tensorflow.variables import native_variable


def _read(variable):
    """A copy: reading a reference variable yields its memory, which the optimizer overwrites."""
    return variable.read_value() if tf.executing_eagerly() else tf.raw_ops.DeepCopy(x=variable.read_value())


class DistributedAdasum(WrappedV1):
    """Every rank steps on its own; after every n-th step, all steps since the last combination are combined.

    Args:
        options: GradientOptions; only compression and process_set apply. passes: n.
    """

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool, options: GradientOptions,
                 passes: int) -> None:
        super().__init__(optimizer, name, use_locking)
        self._options = options
        self._passes = passes
        self._counter: Any = None                        # this and the next only with passes > 1
        self._starts: dict[int, Any] = {}       # id of a variable -> (variable, its weights at the start of the window)

    def _make_variables(self, variables):
        # Outside of the function being traced, which may create variables only once.
        with tf.init_scope():
            if self._counter is None:
                self._counter = tf.compat.v1.Variable(0, trainable=False, use_resource=True, name="adasum_passes")
            for variable in map(native_variable, variables):
                if id(variable) not in self._starts:
                    # In a graph it is assigned before it is read; in eager mode the window may have begun.
                    start = variable if tf.executing_eagerly() else tf.zeros(variable.shape, variable.dtype.base_dtype)
                    self._starts[id(variable)] = variable, tf.compat.v1.Variable(
                        start, trainable=False, use_resource=True, name="adasum_start"
                    )

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        grads_and_vars = list(grads_and_vars)
        if not self._options.communicates:
            return super().apply_gradients(grads_and_vars, *args, **kwargs)
        variables = [variable for gradient, variable in grads_and_vars if gradient is not None]
        if self._passes == 1:
            starts = list(map(_read, variables))
            with tf.control_dependencies(starts):
                stepped = super().apply_gradients(grads_and_vars, *args, **kwargs)
            with tf.control_dependencies([] if stepped is None else [stepped]):
                return tf.group(self._combine(variables, starts))
        self._make_variables(variables)

        def begin():
            assigned = [tf.identity(start.assign(_read(variable))) for variable, start in self._starts.values()]
            with tf.control_dependencies(assigned):
                return tf.constant(True)

        def combine():
            variables, starts = zip(*self._starts.values(), strict=True)
            with tf.control_dependencies(self._combine(variables, [start.read_value() for start in starts])):
                return tf.constant(True)

        begun = tf.cond(tf.equal(self._counter % self._passes, 0), begin, lambda: tf.constant(False))
        with tf.control_dependencies([begun]):
            stepped = super().apply_gradients(grads_and_vars, *args, **kwargs)
        with tf.control_dependencies([begun] if stepped is None else [stepped]):
            count = self._counter.assign_add(1)
        with tf.control_dependencies([tf.identity(count)]):
            return tf.cond(tf.equal(tf.identity(count) % self._passes, 0), combine, lambda: tf.constant(False))

    def _combine(self, variables, starts):
        steps = [variable.read_value() - start for variable, start in zip(variables, starts, strict=True)]
        combined = grouped_allreduce(steps, op=Adasum, compression=self._options.compression)
        return [tf.identity(variable.assign(start + step))
                for variable, start, step in zip(variables, starts, combined, strict=True)]
