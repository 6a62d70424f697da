"""DistributedOptimizer for TensorFlow: for optimizers of Keras 3, of tf_keras, and of tf.compat.v1."""
import tensorflow as tf

from bagua_hvd._keras.optimizer import wrap
from bagua_hvd._keras.types import Groups, OptimizerT
from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.collectives.compression import Compressor
from bagua_hvd.job.basics import Adasum, Average
from bagua_hvd.job.process_sets import ProcessSet, global_process_set
from bagua_hvd.reduction.options import GradientOptions, groups_of
from bagua_hvd.tensorflow.adasum import DistributedAdasum
from bagua_hvd.tensorflow.compression import Compression
from bagua_hvd.tensorflow.optimizer_v1 import DistributedV1


def DistributedOptimizer(optimizer: OptimizerT, name: str | None = None, use_locking: bool = False,
                         device_dense: str = "", device_sparse: str = "",
                         compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                         backward_passes_per_step: int = 1, op: int = Average, gradient_predivide_factor: float = 1.0,
                         average_aggregated_gradients: bool = False, num_groups: int = 0, groups: Groups = None,
                         process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True,
                         algorithm: str | Algorithm | type[Algorithm] | None = None, delay: int = 0) -> OptimizerT:
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
        delay: 1: gradients travel until the next step, which applies them; the first one applies zeros. So a whole step
            hides them. For algorithms that communicate gradients; see docs/algorithms.md. A rank without others applies
            its own at once.
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
        delay=delay,
    ).check()
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, not {backward_passes_per_step}")
    if is_v1:
        if op == Adasum:
            if average_aggregated_gradients:
                raise ValueError("Adasum does not support average_aggregated_gradients == True")
            return DistributedAdasum(optimizer, name, use_locking, options, backward_passes_per_step)
        return DistributedV1(optimizer, name, use_locking, options, backward_passes_per_step,
                             average_aggregated_gradients)
    return wrap(optimizer, options, backward_passes_per_step, average_aggregated_gradients)
