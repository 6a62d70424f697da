"""DistributedOptimizer for tf_keras, the Keras 2 that continues beside Keras 3 (TF_USE_LEGACY_KERAS=1).

Gradients are reduced where Keras 2 lets its optimizers sum the gradients of replicas: in _compute_gradients(),
get_gradients() and _aggregate_gradients() (new optimizers: aggregate_gradients()). apply_gradients() reduces only those
not reduced before. So the user sees and clips reduced gradients, and a LossScaleOptimizer around this one looks for
infinities in values that are equal on all ranks.

This module is also TensorFlow's backend of Keras: see _keras/backend.py.
"""
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from bagua_hvd._keras import backend, legacy
from bagua_hvd._keras.optimizer import HasDistribution
from bagua_hvd.core.identity import ByIdentity
from bagua_hvd.reduction.options import GradientOptions
from bagua_hvd.tensorflow.compression import Compression  # noqa: F401  (this and the next two: see backend.py)
from bagua_hvd.tensorflow.elastic import translated_errors  # noqa: F401
from bagua_hvd.tensorflow.functions import broadcast_global_variables  # noqa: F401
from bagua_hvd.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from bagua_hvd.tensorflow.graphs import as_written, native_variable
from bagua_hvd.tensorflow.reduction import Reduction
from bagua_hvd.tensorflow.step import Uses

# The mixin precedes an optimizer's class, which has the methods. Users of such an optimizer import tf_keras.
if TYPE_CHECKING:
    from tf_keras.optimizers import Optimizer as _Wrapped
else:
    _Wrapped = object

ALL_IN_ONE = (
    "{name} reads the weights around the optimizer's step: gradients cannot be aggregated before apply_gradients(), "
    "as a LossScaleOptimizer does it (with dtype policy mixed_float16; mixed_bfloat16 needs none)"
)


class _Distribution:
    def __init__(self, optimizer, options, passes, average_aggregated):
        self.reduction = Reduction(options, optimizer, passes)
        self.aggregation = None
        self.all_in_one = Uses(options.algorithm, optimizer).any      # only apply_gradients() reduces
        self.applying = False       # while reduced gradients are applied
        self._reduced: ByIdentity | None = None     # variables with reduced gradients that are not applied yet
        if passes > 1:
            self.aggregation = LocalGradientAggregationHelper(
                passes, self.reduction, options.sparse_as_dense, average_aggregated)

    def reset(self):
        """Drops accumulated and pending gradients."""
        self._reduced = None
        self.reduction.reset()
        if self.aggregation is not None:
            self.aggregation.reset()

    def of_window(self, pairs):
        """The pairs, and others without a gradient for further variables that this window has gradients of."""
        helper = self.aggregation
        if helper is None or not tf.compat.v1.executing_eagerly_outside_functions():
            return pairs
        others = helper.others_in_window([variable for _, variable in pairs])
        self.reduction.check_window(helper._counter, helper.backward_passes_per_step, others)
        return pairs + [(None, variable) for variable in others if tf.executing_eagerly()]

    def reduce(self, optimizer, pairs):
        """Pairs of reduced gradients and their variables; before the last pass of a window, not to be applied."""
        gradients, variables = zip(*self.of_window(pairs), strict=True)
        with tf.init_scope():       # variables cannot be created within a condition
            legacy.build(optimizer, variables)
        reduce = self.aggregation.compute_gradients if self.aggregation else self.reduction
        return list(zip(reduce(gradients, variables), variables, strict=True))

    def aggregate(self, optimizer, pairs):
        """reduce() for apply_gradients(), which does not reduce these again."""
        pairs = list(pairs)
        if self.applying or not pairs:
            return pairs
        pairs = self.reduce(optimizer, pairs)
        self._reduced = ByIdentity(native_variable)
        for _, variable in pairs:
            self._reduced.add(variable)
        return pairs

    def is_reduced(self, variables):
        """Whether gradients of these variables were reduced; asking clears it."""
        reduced, self._reduced = self._reduced, None
        return reduced is not None and all(variable in reduced for variable in variables)


class _Distributed(HasDistribution, _Wrapped):
    """The mixin that DistributedOptimizer puts before the class of the given optimizer."""

    _distribution_class = _Distribution

    def _aggregate(self, grads_and_vars):
        if self.distribution.all_in_one:
            raise ValueError(ALL_IN_ONE.format(name=type(self._settings[0].algorithm).__name__))
        return self.distribution.aggregate(self, grads_and_vars)

    @as_written
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        distribution, base, pairs = self.distribution, super().apply_gradients, list(grads_and_vars)
        if not pairs:
            return base(pairs, *args, **kwargs)
        reduced = distribution.is_reduced([variable for _, variable in pairs])
        as_given = not reduced and (kwargs.get("skip_gradients_aggregation", False)
                                    or not kwargs.get("experimental_aggregate_gradients", True))
        if not reduced and not as_given:
            pairs = distribution.reduce(self, pairs)

        def apply():
            distribution.applying = True
            try:
                return distribution.reduction.update_seen(
                    lambda: base(pairs, *args, **kwargs), lambda: self.iterations.assign_add(1))
            finally:
                distribution.applying = False

        if as_given or distribution.aggregation is None:
            return apply()
        return distribution.aggregation.apply_gradients(apply, self)


class _DistributedNew(_Distributed):
    """Has the hooks of tf_keras.optimizers."""

    @as_written
    def aggregate_gradients(self, grads_and_vars):
        """Reduces the gradients over the ranks, for a following apply_gradients().

        Raises:
            ValueError: the algorithm reads weights.
        """
        return super().aggregate_gradients(grads_and_vars) if self.distribution.applying else \
            self._aggregate(grads_and_vars)


class _DistributedLegacy(_Distributed):
    """Has the hooks of tf_keras.optimizers.legacy."""

    @as_written
    def _compute_gradients(self, *args, **kwargs):
        pairs = super()._compute_gradients(*args, **kwargs)
        return pairs if self.distribution.all_in_one else self._aggregate(pairs)

    @as_written
    def get_gradients(self, loss, params):
        gradients, variables = super().get_gradients(loss, params), tf.nest.flatten(params)
        if self.distribution.all_in_one:
            return gradients
        return [gradient for gradient, _ in self._aggregate(zip(gradients, variables, strict=True))]

    @as_written
    def _aggregate_gradients(self, grads_and_vars):
        return super()._aggregate_gradients(grads_and_vars) if self.distribution.applying else \
            self._aggregate(grads_and_vars)


def wrap(optimizer: Any, options: GradientOptions, passes: int, average_aggregated: bool) -> Any:
    """Makes the distributed optimizer from the configuration of the given one; see wrap() in _keras/optimizer.py."""
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    base = type(optimizer)
    hooks = _DistributedLegacy if hasattr(base, "_aggregate_gradients") else _DistributedNew
    cls: type[Any] = type(base.__name__, (hooks, base), {
        "__doc__": base.__doc__, "__module__": base.__module__, "__qualname__": base.__qualname__,
        "_settings": (options, passes, average_aggregated),
    })
    wrapped = cls.from_config(optimizer.get_config())
    _ = wrapped.distribution        # made now, to refuse unsupported algorithms here
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_names"):     # the configuration lacks them
        if hasattr(optimizer, name):
            setattr(wrapped, name, getattr(optimizer, name))
    return wrapped


def load_model(filepath: Any, wrap_optimizer: Callable[..., Any], custom_objects: dict[str, Any]) -> Any:
    """tf_keras.models.load_model() with the optimizer wrapped by `wrap_optimizer`, and the state that tf_keras loads.

    tf_keras loads no optimizer state from a SavedModel, nor a legacy optimizer's from a .keras file: it starts anew.
    """
    import tf_keras

    model = tf_keras.models.load_model(filepath, custom_objects=custom_objects)
    if model.optimizer is not None:
        legacy.build(model.optimizer, model.trainable_variables)        # some formats leave it unbuilt
        saved = legacy.variables(model.optimizer)
        model.optimizer = wrap_optimizer(model.optimizer)
        legacy.build(model.optimizer, model.trainable_variables)
        for variable, value in zip(legacy.variables(model.optimizer), saved, strict=True):
            variable.assign(value)
    return model


backend.register(sys.modules[__name__])
