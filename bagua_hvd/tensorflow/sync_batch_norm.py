"""Batch normalization with the statistics of all ranks' batches, as a layer of tf.keras (Keras 3 or tf_keras).

Rank i of n holds m_i values of each channel with mean mu_i and variance v_i; N = sum_i m_i. Per channel:

    mu  = sum_i m_i mu_i / N
    var = sum_i m_i (v_i + (mu_i - mu)^2) / N = sum_i m_i (v_i + mu_i^2) / N - mu^2

after one allreduce of 2 C + 1 numbers, through which their gradients flow back. It uses float64, because the difference
loses digits. Differs from Horovod, which weights all ranks equally, regardless of their batches.
"""
from typing import Any

import tensorflow as tf

from bagua_hvd._keras import legacy
from bagua_hvd.job.basics import Sum
from bagua_hvd.job.process_sets import global_process_set
from bagua_hvd.tensorflow import collective_ops

# The Keras behind tf.keras; not imported by that name, because TensorFlow reads the environment only once.
if legacy.in_use():
    from tf_keras.layers import BatchNormalization
    from tf_keras.saving import register_keras_serializable
else:
    from keras.layers import BatchNormalization
    from keras.saving import register_keras_serializable

_STATISTICS = "_calculate_mean_and_var" if legacy.in_use() else "_moments"      # Keras' method, overridden below


def _of_all_ranks(inputs, axes, mask, mean, variance):
    """Mean and variance of all ranks' inputs along the axes, from this rank's; of the same shape and dtype."""
    if mask is None:
        count = tf.reduce_prod(tf.gather(tf.shape(inputs), axes))
    else:
        count = tf.reduce_sum(tf.cast(mask, tf.int32))
    dtype, shape = mean.dtype, mean.shape
    m, mu, v = (tf.reshape(tf.cast(value, tf.float64), [-1]) for value in (count, mean, variance))
    # Without values there are no statistics: 0 / 0 on this rank must not reach the others.
    mu, v = (tf.where(m > 0, value, tf.zeros_like(value)) for value in (mu, v))
    summed = collective_ops.allreduce([tf.concat([m, m * mu, m * (v + mu * mu)], 0)], None, Sum, 1.0, 1.0,
                                      global_process_set.process_set_id, label="SyncBatchNormalization")[0]
    C = mu.shape[0]
    N = tf.maximum(summed[0], 1.0)
    mu = summed[1:C + 1] / N
    var = tf.maximum(summed[C + 1:] / N - mu * mu, 0.0)
    return tuple(tf.reshape(tf.cast(value, dtype), shape) for value in (mu, var))


@register_keras_serializable("bagua_hvd")
class SyncBatchNormalization(BatchNormalization):
    """Batch normalization over the batches of all ranks in training; otherwise Keras' own.

    All ranks must run it equally often. Works in eager mode, in tf.function and compiled by XLA. Import
    bagua_hvd.tensorflow before loading a saved model that contains it.

    Args:
        fused: False. kwargs: as tf.keras.layers.BatchNormalization takes them.
    Raises:
        ValueError: fused is True or None; with tf_keras, virtual_batch_size is given.
        NotImplementedError: this Keras computes statistics in another way.
        tf.errors.UnknownError: when it runs: a rank was lost.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True: its statistics are of all ranks")
        if kwargs.get("virtual_batch_size") is not None:
            raise ValueError("SyncBatchNormalization does not support virtual_batch_size: its batch is of all ranks")
        if not hasattr(BatchNormalization, _STATISTICS):    # each rank would use its own statistics
            raise NotImplementedError(f"SyncBatchNormalization needs {_STATISTICS}(), which the BatchNormalization of "
                                      "this Keras lacks")
        super().__init__(**kwargs)
        self.fused = False              # otherwise tf_keras uses the fused kernel where it can

    if legacy.in_use():
        def _calculate_mean_and_var(self, inputs, reduction_axes, keep_dims, mask=None):
            mean, variance = super()._calculate_mean_and_var(inputs, reduction_axes, keep_dims, mask)
            return _of_all_ranks(inputs, reduction_axes, mask, mean, variance)
    else:
        def _moments(self, inputs, mask):
            mean, variance = super()._moments(inputs, mask)
            return _of_all_ranks(inputs, self._reduction_axes, mask, mean, variance)
