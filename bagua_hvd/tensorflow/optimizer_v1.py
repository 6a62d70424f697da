"""Optimizers of tf.compat.v1 that reduce gradients, and the wrapper that Adasum uses, too."""
from typing import Any

import tensorflow as tf

from bagua_hvd._keras.checkpoint import HasDistribution
from bagua_hvd.core.util import doc_from
from bagua_hvd.reduction.options import GradientOptions
from bagua_hvd.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from bagua_hvd.tensorflow.graphs import as_written
from bagua_hvd.tensorflow.reduction import Reduction


class WrappedV1(tf.compat.v1.train.Optimizer):
    """Wraps an optimizer of tf.compat.v1 and forwards everything to it."""

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool) -> None:
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)


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
        gradients, variables = zip(*super().compute_gradients(*args, **kwargs), strict=True)
        reduce = self._aggregation.compute_gradients if self._aggregation else self._reduction
        return list(zip(reduce(gradients, variables), variables, strict=True))

    @as_written
    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        base = super().apply_gradients

        def apply():        # NO_STEP_TO_REPLACE: no algorithm updates the weights instead
            return self._reduction.update_seen(lambda: base(*args, **kwargs), lambda: None)

        if self._aggregation is None:
            return apply()
        return self._aggregation.apply_gradients(apply, self._optimizer, *args, **kwargs)
