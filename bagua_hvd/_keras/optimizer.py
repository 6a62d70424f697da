"""DistributedOptimizer for Keras 3: a subclass of the optimizer's class that reduces gradients inside apply().

All ways to train with Keras lead through Optimizer.apply(): fit(), compiled by XLA or not, train_on_batch(),
apply_gradients() in a loop of one's own. Gradients are reduced there before Keras clips, unscales or looks at them.
When a class takes another way, its update would use gradients of this rank alone; that is an error, not a surprise
at the end of training.

How they are reduced is the backend's matter (_keras/backend.py); here is what every backend has: accumulation over
backward passes, loss scaling, serialization under the name of the original class. Optimizers of tf_keras are handed to
tensorflow/tf_keras.py.
"""
import functools
import zipfile
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from bagua_hvd._keras import legacy
from bagua_hvd._keras.backend import as_written, make_reduction, of_tf_keras
from bagua_hvd._keras.checkpoint import AlgorithmState, HasDistribution
from bagua_hvd.core.identity import ByIdentity
from bagua_hvd.reduction.options import GradientOptions

NOT_REDUCED = (
    "{name} is about to apply gradients that have not been reduced over the ranks, which would drive the ranks' "
    "weights apart: apply them by optimizer.apply(), apply_gradients() or fit(), not by calling {method}() directly."
)

NOT_SCALED = (
    "{name} cannot serve a LossScaleOptimizer, whose gradients are scaled until the step: use bfloat16 (dtype policy "
    "mixed_bfloat16), or compile(auto_scale_loss=False)"
)


WEIGHT_OUTSIDE = (
    "set_weight() was called in eager mode, and the gradients are applied in a graph, which would keep that one "
    "number: call it where the step is traced, in train_step()"
)


class _Distribution:
    """What a distributed optimizer has beside the attributes of its class.

    Attributes:
        reduction: see _keras/backend.py.
        reduced: gradients that are being applied have been reduced.
        applied: None, or a function of Keras' operations that becomes the last part of steps that are traced later.
        begins_anew: Keras has passed over the optimizer's state in the file that is being loaded.
    """

    begins_anew = False

    def __init__(self, optimizer, options, passes, average_aggregated):
        self.reduction = make_reduction(options, optimizer, passes)
        self.passes = passes
        self.average_aggregated = average_aggregated
        self.reduced = False
        self.applied: Callable[[], Any] | None = None
        self._weight: tuple[Any, bool] | None = None        # of the next average; given while a graph was traced
        self._counter: keras.Variable | None = None
        self._sums = ByIdentity(self.reduction.native)      # by variable: what this window's passes have added up
        # Variables that had a gradient in this window, by id of the native one. When graphs run is unknown here, so
        # what they add to stays.
        self._window: dict[int, Any] = {}

    def build(self, variables):
        """Makes the variables that accumulation needs. They are no optimizer variables: a checkpoint is the class's.

        Returns:
            The counter of passes, None where nothing accumulates.
        """
        if self.passes == 1:
            return None
        if self._counter is None:
            self._counter = keras.Variable(0, dtype="int32", trainable=False, name="backward_passes")
        for variable in variables:
            if variable not in self._sums:
                self._sums[variable] = keras.Variable(
                    ops.zeros(variable.shape, variable.dtype), trainable=False, name="gradient_sum"
                )
        return self._counter

    def reset(self):
        """Forgets accumulated gradients and whatever is pending."""
        self.reduction.reset()
        self._window = {}
        for variable in (self._counter, *self._sums.values()):
            if variable is not None:
                variable.assign(ops.zeros_like(variable))

    def apply(self, optimizer, gradients, variables, apply):
        """Reduces the gradients and applies them by `apply`; or adds them up, until the last pass of the window.

        Args:
            optimizer: whose iterations advance where nothing is applied.
            apply: function of gradients and variables.
        """
        if self.passes == 1:
            self._apply_reduced(optimizer, gradients, variables, apply)
            return
        counter = self.build(variables)
        counter.assign_add(1)
        by_id = {id(self.reduction.native(variable)): variable for variable in variables}
        for (key, variable), gradient in zip(by_id.items(), gradients, strict=True):
            if gradient is not None:
                total = self._sums[variable]
                total.assign_add(ops.cast(self.reduction.dense(gradient), total.dtype))
                self._window[key] = variable

        def last_pass():
            window = self._window
            everything = by_id if self.reduction.traces() else by_id | window
            summed = [key for key in everything if key in window]
            taken = self.reduction.take([self._sums[everything[key]] for key in summed])
            totals = dict(zip(summed, taken, strict=True))
            if not self.reduction.traces():
                self._window = {}
            if self.average_aggregated:
                totals = {key: total / self.passes for key, total in totals.items()}
            self._apply_reduced(optimizer, list(map(totals.get, everything)), list(everything.values()), apply)

        def other_pass():
            innermost(optimizer)._iterations.assign_add(1)

        ops.cond(ops.equal(counter % self.passes, 0), last_pass, other_pass)

    def set_weight(self, weight):
        """See Distributed.set_weight."""
        self._weight = weight, self.reduction.traces()

    def _apply_reduced(self, optimizer, gradients, variables, apply):
        (weight, traced), self._weight = self._weight or (None, True), None
        if self.reduction.traces() and not traced:
            raise ValueError(WEIGHT_OUTSIDE)
        gradients = self.reduction(gradients, variables, weight=weight)

        def by_optimizer():
            self.reduced = True
            try:
                apply(gradients, variables)
            finally:
                self.reduced = False

        def by_algorithm():
            """What else apply() does."""
            for variable in variables:
                if getattr(variable, "constraint", None) is not None:
                    variable.assign(variable.constraint(variable))
            innermost(optimizer)._iterations.assign_add(1)

        def update():
            self.reduction.update(by_optimizer, by_algorithm)
            self.reduction.stepped()

        if self.applied is None:
            update()
        else:
            self.reduction.in_turn(gradients, update, self.applied)


def _built(optimizer, trainable_variables):
    """What apply() is to update; the optimizer has its variables then: a condition, which comes next, can make none."""
    variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True
    return variables


class Distributed(HasDistribution, keras.optimizers.Optimizer):
    """What DistributedOptimizer puts before the class of the optimizer it is given."""

    _distribution_class = _Distribution
    built: bool
    loss_scaled = False         # by a LossScaleOptimizer around it: the gradients that are reduced are multiplied

    @property
    def algorithm(self) -> Any:
        """The Algorithm by which gradients travel."""
        return self._settings[0].algorithm

    @functools.cached_property      # see HasDistribution
    def algorithm_state(self) -> AlgorithmState:
        """The part of the optimizer by which Keras saves what the algorithm keeps."""
        return AlgorithmState(self)

    def set_weight(self, weight: Any) -> None:
        """Makes the next average a weighted one: sum of w_i g_i / sum of w_i over the ranks, instead of equal weights.

            def train_step(self, data):
                self.optimizer.set_weight(keras.ops.shape(data[0])[0])
                return super().train_step(data)

        Args:
            weight: samples or tokens of this rank that its gradients are the mean over, a number or a scalar tensor;
                0: this rank adds nothing. To be given on all ranks, in each step that is weighted; with
                backward_passes_per_step it is that of the whole window, given in its last pass.
        Raises:
            ValueError: from apply(): op is not Average; the algorithm does not average gradients in every step; a
                graph is traced, and this was called outside of it. On all ranks (on TensorFlow as
                tf.errors.InvalidArgumentError): a weight is negative or not finite, or all are 0.
        """
        self.distribution.set_weight(weight)

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.distribution.build(variables)

    def load_own_variables(self, store: Any) -> None:
        super().load_own_variables(store)
        # Then Keras warns, and loads nothing: most often, the optimizer has not been built.
        self.distribution.begins_anew = len(store.keys()) != len(self.variables)

    @as_written
    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        apply = super().apply
        gradients = list(grads)
        if self.distribution.reduced or not gradients:      # reduced: by a LossScaleOptimizer around this one
            return apply(gradients, trainable_variables)
        variables = _built(self, trainable_variables)
        return self.distribution.apply(self, gradients, variables, apply)

    def _require_reduced(self, method):
        if not self.distribution.reduced:
            raise RuntimeError(NOT_REDUCED.format(name=type(self).__name__, method=method))

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        self._require_reduced("_backend_update_step")
        return super()._backend_update_step(grads, trainable_variables, learning_rate)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> Any:
        self._require_reduced("update_step")
        return super().update_step(gradient, variable, learning_rate)


# compile() of a model with dtype policy mixed_float16 puts a LossScaleOptimizer around the one it is given. That looks
# for infinities in its gradients and applies them conditionally; so it is there that they must be reduced already, or
# the ranks would take different branches, and some wait for the others forever.
_scaled_apply = keras.optimizers.LossScaleOptimizer.apply


@as_written
def _apply_scaled(self, grads, trainable_variables=None):
    inner = self.inner_optimizer
    gradients = list(grads)
    if not isinstance(inner, Distributed) or inner.distribution.reduced or not gradients:
        return _scaled_apply(self, gradients, trainable_variables)
    if inner.algorithm.replaces_step or inner._settings[0].keeps_gradients:
        raise _not_scaled(inner._settings[0])
    inner.loss_scaled = True
    variables = _built(self, trainable_variables)
    return inner.distribution.apply(self, gradients, variables, functools.partial(_scaled_apply, self))


# On torch's backend, Keras 3.16 trains by DistributedDataParallel where torch has a process group.
_make_ddp: Any = getattr(keras.Model, "_initialize_ddp", None)


def _make_ddp_for_others(self):
    """Not around a model whose optimizer reduces gradients itself: they would travel twice, once in full."""
    if distributions(getattr(self, "optimizer", None)):
        object.__setattr__(self, "ddp_model", None)
    else:
        _make_ddp(self)


def _adapt_keras():
    """Changes what Keras does with distributed optimizers where they cannot themselves; again and again is once."""
    scaled: Any = keras.optimizers.LossScaleOptimizer
    scaled.apply = _apply_scaled
    scaled.set_weight = lambda self, weight: self.inner_optimizer.set_weight(weight)
    scaled.register_local_var = lambda self, var: self.inner_optimizer.register_local_var(var)
    scaled.algorithm = property(lambda self: self.inner_optimizer.algorithm)
    if _make_ddp is not None:
        keras.Model._initialize_ddp = _make_ddp_for_others


def _not_scaled(options):
    return ValueError(NOT_SCALED.format(name="delay=1" if options.delay else type(options.algorithm).__name__))


def innermost(optimizer: Any) -> Any:
    """The optimizer that holds the hyperparameters: without a LossScaleOptimizer around it."""
    while getattr(optimizer, "inner_optimizer", None) is not None:
        optimizer = optimizer.inner_optimizer
    return optimizer


def distributions(optimizer: Any) -> Any:
    """Those of the optimizer and of the one within it; an optimizer that is not distributed has none."""
    found = []
    while optimizer is not None:
        if hasattr(optimizer, "distribution"):
            found.append(optimizer.distribution)
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return found


def forget_step(optimizer: Any) -> None:
    """Drops what a distributed optimizer has accumulated or pending; others are left alone."""
    for distribution in distributions(optimizer):
        distribution.reset()


def _subclass(base, settings):
    """A class of the same name, which Keras saves as `base`: what it saved loads without this package."""
    cls = type(base.__name__, (Distributed, base), {
        "__doc__": base.__doc__, "__module__": base.__module__, "__qualname__": base.__qualname__,
        "_settings": settings,
    })
    package, _, name = keras.saving.get_registered_name(base).rpartition(">")
    if package:
        for registered in (cls, base):      # the last one is what loading finds
            keras.saving.register_keras_serializable(package, name)(registered)
    return cls


def wrap(optimizer: Any, options: GradientOptions, passes: int = 1, average_aggregated: bool = False) -> Any:
    """The distributed optimizer; hyperparameters, variables and state are shared with the given one.

    Args:
        optimizer: keras.Optimizer; only the result should be used from then on. One of tf_keras is copied.
        options: GradientOptions, checked.
        passes, average_aggregated: backward_passes_per_step, average_aggregated_gradients.
    Raises:
        ValueError: not an optimizer of Keras, or a distributed one already.
    """
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, not {passes}")
    if legacy.is_optimizer(optimizer):
        return of_tf_keras().wrap_legacy(optimizer, options, passes, average_aggregated)
    if isinstance(optimizer, Distributed) or isinstance(innermost(optimizer), Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"expected a keras.optimizers.Optimizer, not {optimizer!r}")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and options.keeps_gradients:
        raise _not_scaled(options)
    _adapt_keras()
    cls = _subclass(type(optimizer), (options, passes, average_aggregated))
    wrapped = cls.__new__(cls)
    wrapped.__dict__.update(optimizer.__dict__)
    distribution = wrapped.distribution     # now: what the algorithm cannot serve is refused here
    if wrapped.built:
        distribution.build(wrapped._trainable_variables)
    return wrapped


def load_model(filepath: Any, wrap_optimizer: Callable[..., Any], custom_optimizers: Any,
               custom_objects: dict[str, Any] | None) -> Any:
    """keras.models.load_model(), and its optimizer wrapped by `wrap_optimizer`, with the state that was saved.

    The algorithm's, too, if it keeps any: of a .keras file, as Keras calls its format.
    """
    classes = {cls.__name__: cls for cls in custom_optimizers or ()}
    if legacy.in_use():
        return of_tf_keras().load_legacy_model(filepath, wrap_optimizer, {**classes, **(custom_objects or {})})
    model = keras.models.load_model(filepath, custom_objects={**classes, **(custom_objects or {})})
    if model.optimizer is not None:
        model.optimizer = wrap_optimizer(model.optimizer)
        options = model.optimizer._settings[0]
        if (options.algorithm.relaxed or options.delay) and zipfile.is_zipfile(filepath):
            model.load_weights(filepath)        # again, now that there is an algorithm to take up its state
    return model
