"""DistributedOptimizer for TensorFlow: for optimizers of Keras 3, of tf_keras, and of tf.compat.v1."""
import tensorflow as tf

from bagua_hvd.common.basics import Adasum, Average
from bagua_hvd.common.gradient_options import GradientOptions, groups_of
from bagua_hvd.common.process_sets import global_process_set
from bagua_hvd.tensorflow.compression import Compression
from bagua_hvd.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from bagua_hvd.tensorflow.graphs import as_written
from bagua_hvd.tensorflow.reduction import Reduction


class _WrappedV1(tf.compat.v1.train.Optimizer):
    """Around an optimizer of tf.compat.v1; passes everything on to it."""

    def __init__(self, optimizer, name, use_locking):
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer

    def compute_gradients(self, *args, **kwargs):
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(self, *args, **kwargs):
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args, **kwargs):
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args, **kwargs):
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args, **kwargs):
        return self._optimizer.variables(*args, **kwargs)


class _DistributedV1(_WrappedV1):
    """Reduces in compute_gradients()."""

    def __init__(self, optimizer, name, use_locking, options, passes, average_aggregated):
        super().__init__(optimizer, name, use_locking)
        self._reduction = Reduction(options, weights=True)
        self._aggregation = None
        if passes > 1:
            if tf.executing_eagerly():
                raise ValueError("backward_passes_per_step > 1 is not supported in eager mode with this optimizer: use "
                                 "an optimizer of Keras.")
            self._aggregation = LocalGradientAggregationHelper(
                passes, self._reduction, options.sparse_as_dense, average_aggregated, process_set=options.process_set,
                scale_local_gradients=options.scale_local_gradients,
            )

    def register_local_var(self, var):
        """Excludes a variable from the reduction: its gradient is this rank's, divided by the number of ranks unless
        scale_local_gradients is False."""
        (self._aggregation.register_local_var if self._aggregation else self._reduction.register_local)(var)

    @as_written
    def compute_gradients(self, *args, **kwargs):
        gradients, variables = zip(*super().compute_gradients(*args, **kwargs), strict=True)
        reduce = self._aggregation.compute_gradients if self._aggregation else self._reduction
        return list(zip(reduce(gradients, variables), variables, strict=True))

    @as_written
    def apply_gradients(self, *args, **kwargs):
        base = super().apply_gradients

        def apply():
            applied = base(*args, **kwargs)
            if tf.executing_eagerly():
                self._reduction.stepped()
                return applied
            with tf.control_dependencies([applied]):
                return tf.group(applied, *self._reduction.stepped())

        if self._aggregation is None:
            return apply()
        return self._aggregation.apply_gradients(apply, self._optimizer, *args, **kwargs)


def DistributedOptimizer(optimizer, name=None, use_locking=False, device_dense="", device_sparse="",
                         compression=Compression.none, sparse_as_dense=False, backward_passes_per_step=1, op=Average,
                         gradient_predivide_factor=1.0, average_aggregated_gradients=False, num_groups=0, groups=None,
                         process_set=global_process_set, scale_local_gradients=True, algorithm=None):
    """Wraps an optimizer so that gradients are reduced over the ranks before it applies them.

    Args:
        optimizer: of Keras 3 (keras.optimizers), tf_keras, or tf.compat.v1.train. The result is of the same class by
            name; for Keras of a subclass, see bagua_hvd.keras.DistributedOptimizer.
        name, use_locking: as of tf.compat.v1.train.Optimizer. device_dense, device_sparse: accepted for Horovod's sake.
        compression: what is done to gradients before they travel: Compression.none, Compression.fp16 or your own.
        sparse_as_dense: IndexedSlices travel as dense tensors; else their rows are gathered (but in what XLA compiles,
            whose shapes are fixed, all travel dense).
        backward_passes_per_step: gradients are summed locally over so many passes, then travel and are applied. Not in
            eager mode with tf.compat.v1 optimizers.
        op: Average, Sum; with tf.compat.v1 optimizers also Adasum, which combines steps instead of gradients.
        gradient_predivide_factor: f: gradients are divided by f before the sum and multiplied by f / size after it.
        average_aggregated_gradients: divide the local sums by backward_passes_per_step.
        num_groups: deprecated, see groups.
        groups: number of groups, or lists of variables, that travel in one operation each. None: buckets of about
            BAGUA_DEFAULT_BUCKET_SIZE bytes (10 MiB).
        process_set: the ranks that reduce; others apply local gradients.
        scale_local_gradients: divide gradients of variables given to register_local_var() by the number of ranks.
        algorithm: how gradients travel: a registered name such as "bytegrad", an Algorithm, or its class. None: the
            name in BAGUA_ALGORITHM, else "gradient_allreduce".
    Raises:
        ValueError: a wrong argument, such as op=Adasum with Keras; an unknown algorithm's sentence lists the known
            ones.
        NotImplementedError: op=Adasum on a process set, or over a number of ranks that is no power of 2.
    """
    is_v1 = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    if op == Adasum and not is_v1:
        raise ValueError("op == Adasum is not supported yet with Keras")
    options = GradientOptions(
        compression=compression, sparse_as_dense=sparse_as_dense, op=op,
        gradient_predivide_factor=gradient_predivide_factor, groups=groups_of(num_groups, groups),
        process_set=process_set, algorithm=algorithm, scale_local_gradients=scale_local_gradients,
    ).check()
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, not {backward_passes_per_step}")
    if is_v1:
        if op == Adasum:
            from bagua_hvd.tensorflow.adasum import DistributedAdasum

            if average_aggregated_gradients:
                raise ValueError("Adasum does not support average_aggregated_gradients == True")
            return DistributedAdasum(optimizer, name, use_locking, options, backward_passes_per_step)
        return _DistributedV1(optimizer, name, use_locking, options, backward_passes_per_step,
                              average_aggregated_gradients)
    from bagua_hvd._keras.optimizer import wrap

    return wrap(optimizer, options, backward_passes_per_step, average_aggregated_gradients)
