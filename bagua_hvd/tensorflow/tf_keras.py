"""DistributedOptimizer for tf_keras, the Keras 2 that lives on beside Keras 3 (TF_USE_LEGACY_KERAS=1)."""
import tensorflow as tf

from bagua_hvd._keras import legacy
from bagua_hvd._keras.checkpoint import HasAlgorithmState
from bagua_hvd.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from bagua_hvd.tensorflow.graphs import as_written
from bagua_hvd.tensorflow.reduction import Reduction


class _Distribution:
    def __init__(self, optimizer, options, passes, average_aggregated):
        self.reduction = Reduction(options, weights=True, optimizer=optimizer, passes=passes)
        self.aggregation = None
        if passes > 1:
            self.aggregation = LocalGradientAggregationHelper(
                passes, self.reduction, options.sparse_as_dense, average_aggregated, process_set=options.process_set,
                scale_local_gradients=options.scale_local_gradients,
            )

    def reset(self):
        """Forgets what is pending."""
        self.reduction.reset()


class _Distributed(HasAlgorithmState):
    """What DistributedOptimizer puts before the class of the optimizer it is given: reduces in apply_gradients()."""

    _settings = None        # arguments for _Distribution; in the subclass

    @property
    def distribution(self):
        """Made when first asked for, so that from_config() of the class needs to know nothing of it."""
        if "_distribution" not in self.__dict__:
            # Not through __setattr__, which tracks what Keras is to save.
            self.__dict__["_distribution"] = _Distribution(self, *self._settings)
        return self.__dict__["_distribution"]

    def register_local_var(self, var):
        """Excludes a variable from the reduction: its gradient is this rank's, divided by the number of ranks unless
        scale_local_gradients is False."""
        distribution = self.distribution
        if distribution.aggregation is not None:
            distribution.aggregation.register_local_var(var)
        else:
            distribution.reduction.register_local(var)

    @as_written
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        gradients, variables = zip(*grads_and_vars, strict=True)
        distribution, base = self.distribution, super().apply_gradients
        with tf.init_scope():       # within a condition, variables cannot be made
            legacy.build(self, variables)

        def apply(reduced):
            applied = distribution.reduction.update(
                lambda: base(list(zip(reduced, variables, strict=True)), *args, **kwargs),
                lambda: self.iterations.assign_add(1),
            )
            with tf.control_dependencies([] if applied is None or tf.executing_eagerly() else [applied]):
                after = distribution.reduction.stepped()
            return tf.group(applied, *after) if after else applied

        if distribution.aggregation is None:
            return apply(distribution.reduction(gradients, variables))
        reduced = distribution.aggregation.compute_gradients(gradients, variables)
        return distribution.aggregation.apply_gradients(lambda: apply(reduced), self)


def wrap(optimizer, options, passes, average_aggregated):
    """The distributed optimizer, made anew from the configuration of the given one.

    Args:
        optimizer: of tf_keras.optimizers or tf_keras.optimizers.legacy. options: GradientOptions, checked.
        passes, average_aggregated: backward_passes_per_step, average_aggregated_gradients.
    Raises:
        ValueError: a distributed optimizer already.
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    base = type(optimizer)
    cls = type(base.__name__, (_Distributed, base), {
        "__doc__": base.__doc__, "__module__": base.__module__, "__qualname__": base.__qualname__,
        "_settings": (options, passes, average_aggregated),
    })
    wrapped = cls.from_config(optimizer.get_config())
    _ = wrapped.distribution        # now: what the algorithm cannot serve is refused here
    return wrapped


def load_model(filepath, wrap_optimizer, custom_objects):
    """tf_keras.models.load_model(), and its optimizer wrapped by `wrap_optimizer`, with the state that tf_keras loads.

    It loads none from a SavedModel, nor of a legacy optimizer from a .keras file: that begins anew.
    """
    import tf_keras

    model = tf_keras.models.load_model(filepath, custom_objects=custom_objects)
    if model.optimizer is not None:
        legacy.build(model.optimizer, model.trainable_variables)        # some formats leave that to the first step
        saved = legacy.variables(model.optimizer)
        model.optimizer = wrap_optimizer(model.optimizer)
        legacy.build(model.optimizer, model.trainable_variables)
        for variable, value in zip(legacy.variables(model.optimizer), saved, strict=True):
            variable.assign(value)
    return model
