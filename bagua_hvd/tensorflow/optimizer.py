"""DistributedOptimizer for TensorFlow: for optimizers of Keras 3, of tf_keras, and of tf.compat.v1."""
from typing import Any

import tensorflow as tf

from bagua_hvd._keras import api
from bagua_hvd._keras.api import Groups, OptimizerT
from bagua_hvd._keras.optimizer import HasDistribution
from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.collectives.compression import Compressor
from bagua_hvd.core.util import doc_from
from bagua_hvd.job.basics import Adasum, Average
from bagua_hvd.job.process_sets import ProcessSet, global_process_set
from bagua_hvd.reduction.options import GradientOptions, check_passes, groups_of
from bagua_hvd.tensorflow.compression import Compression
from bagua_hvd.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from bagua_hvd.tensorflow.graphs import as_written, native_variable
from bagua_hvd.tensorflow.mpi_ops import grouped_allreduce
from bagua_hvd.tensorflow.reduction import Reduction


class WrappedV1(tf.compat.v1.train.Optimizer):
    """Wraps an optimizer of tf.compat.v1, whose slots and variables are its own, too."""

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool) -> None:
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self.get_slot, self.get_slot_names, self.variables = (
            optimizer.get_slot, optimizer.get_slot_names, optimizer.variables)


class DistributedV1(WrappedV1):
    """Reduces in compute_gradients()."""

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool, options: GradientOptions, passes: int,
                 average_aggregated: bool) -> None:
        super().__init__(optimizer, name, use_locking)
        self._reduction = Reduction(options)
        self._aggregation = None
        if passes > 1:
            if tf.executing_eagerly():
                raise ValueError("backward_passes_per_step > 1 is not supported in eager mode with this optimizer: use "
                                 "an optimizer of Keras.")
            self._aggregation = LocalGradientAggregationHelper(
                passes, self._reduction, options.sparse_as_dense, average_aggregated)

    @doc_from(HasDistribution.register_local_var)
    def register_local_var(self, var: Any) -> None:
        self._reduction.register_local(var)

    def set_weight(self, weight: Any) -> None:
        """Makes the next average a weighted one; see set_weight() of an optimizer of Keras."""
        self._reduction.set_weight(weight)

    @as_written
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list:
        gradients, variables = zip(*self._optimizer.compute_gradients(*args, **kwargs), strict=True)
        reduce = self._aggregation.compute_gradients if self._aggregation else self._reduction
        return list(zip(reduce(gradients, variables), variables, strict=True))

    @as_written
    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        def apply():        # NO_STEP_TO_REPLACE: no algorithm updates the weights instead
            return self._reduction.update_seen(lambda: self._optimizer.apply_gradients(*args, **kwargs), lambda: None)

        if self._aggregation is None:
            return apply()
        return self._aggregation.apply_gradients(apply, self._optimizer, *args, **kwargs)


def _read(variable):
    """A copy: reading a reference variable yields its memory, which the optimizer overwrites."""
    return variable.read_value() if tf.executing_eagerly() else tf.raw_ops.DeepCopy(x=variable.read_value())


class DistributedAdasum(WrappedV1):
    """Adasum: every rank steps on its own; after every n-th step, all steps since the last combination are combined.

        d_i = optimizer's step(s) of rank i, from common weights w        w <- w + Adasum(d_0, ..., d_{n-1})

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

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        grads_and_vars = list(grads_and_vars)
        if not self._options.communicates:
            return self._optimizer.apply_gradients(grads_and_vars, *args, **kwargs)
        variables = [variable for gradient, variable in grads_and_vars if gradient is not None]
        if self._passes == 1:
            starts = list(map(_read, variables))
            with tf.control_dependencies(starts):
                stepped = self._optimizer.apply_gradients(grads_and_vars, *args, **kwargs)
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
            stepped = self._optimizer.apply_gradients(grads_and_vars, *args, **kwargs)
        with tf.control_dependencies([begun] if stepped is None else [stepped]):
            count = self._counter.assign_add(1)
        with tf.control_dependencies([tf.identity(count)]):
            return tf.cond(tf.equal(tf.identity(count) % self._passes, 0), combine, lambda: tf.constant(False))

    def _combine(self, variables, starts):
        steps = [variable.read_value() - start for variable, start in zip(variables, starts, strict=True)]
        combined = grouped_allreduce(steps, op=Adasum, compression=self._options.compression)
        return [tf.identity(variable.assign(start + step))
                for variable, start, step in zip(variables, starts, combined, strict=True)]


@doc_from(api.DistributedOptimizer, "Takes optimizers of tf.compat.v1.train, too. With these op may be Adasum, which "
          "combines steps instead of gradients (NotImplementedError: on a process set, or over a number of ranks that "
          "is no power of 2), and backward_passes_per_step is 1 in eager mode.",
          use_locking="as of tf.compat.v1.train.Optimizer.")
def DistributedOptimizer(optimizer: OptimizerT, name: str | None = None, use_locking: bool = False,
                         device_dense: str = "", device_sparse: str = "",
                         compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                         backward_passes_per_step: int = 1, op: int = Average, gradient_predivide_factor: float = 1.0,
                         average_aggregated_gradients: bool = False, num_groups: int = 0, groups: Groups = None,
                         process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True,
                         algorithm: str | Algorithm | type[Algorithm] | None = None, delay: int = 0) -> OptimizerT:
    groups = groups_of(num_groups, groups)
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if op == Adasum:
            raise ValueError("op == Adasum is not supported yet with Keras")
        return api.DistributedOptimizer(
            optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
            backward_passes_per_step, average_aggregated_gradients, 0, groups, process_set, scale_local_gradients,
            algorithm, delay)
    options = GradientOptions(compression, sparse_as_dense, op, gradient_predivide_factor, groups, process_set,
                              algorithm, scale_local_gradients, delay).check()
    check_passes(backward_passes_per_step)
    if op != Adasum:
        return DistributedV1(optimizer, name, use_locking, options, backward_passes_per_step,
                             average_aggregated_gradients)
    if average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    return DistributedAdasum(optimizer, name, use_locking, options, backward_passes_per_step)
