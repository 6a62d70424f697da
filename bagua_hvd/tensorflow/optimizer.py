"""DistributedOptimizer for TensorFlow: for optimizers of Keras 3, of tf_keras, and of tf.compat.v1."""
import tensorflow as tf

from bagua_hvd._keras import api
from bagua_hvd._keras.types import Groups, OptimizerT
from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.collectives.compression import Compressor
from bagua_hvd.core.util import doc_from
from bagua_hvd.job.basics import Adasum, Average
from bagua_hvd.job.process_sets import ProcessSet, global_process_set
from bagua_hvd.reduction.options import GradientOptions, check_passes, groups_of
from bagua_hvd.tensorflow.adasum import DistributedAdasum
from bagua_hvd.tensorflow.compression import Compression
from bagua_hvd.tensorflow.optimizer_v1 import DistributedV1


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
