"""DistributedOptimizer for Keras 3: a subclass of the optimizer's class that reduces gradients inside apply().

All training with Keras calls Optimizer.apply(): fit(), compiled by XLA or not, train_on_batch(), and apply_gradients()
in your own loop. There gradients are reduced before Keras clips, unscales or reads them. A class that bypasses apply()
would update with the gradients of this rank alone; that raises an error at once.

The backend defines how they are reduced (_keras/backend.py). This file has the part common to all backends:
accumulation over backward passes, loss scaling, serialization under the name of the original class. Optimizers of
tf_keras are passed to tensorflow/tf_keras.py.
"""
import functools
import zipfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from bagua_hvd._keras import legacy
from bagua_hvd._keras.backend import as_written, make_reduction, of_tf_keras
from bagua_hvd.core.identity import ByIdentity
from bagua_hvd.reduction.options import GradientOptions, check_passes
from bagua_hvd.training.state import from_bytes, to_bytes

NOT_REDUCED = (
    "{name} is about to apply gradients that have not been reduced over the ranks, so the ranks' weights would "
    "diverge: call optimizer.apply(), apply_gradients() or fit(), not {method}()."
)

NOT_SCALED = (
    "{name} cannot serve a LossScaleOptimizer, whose gradients are scaled until the step: use bfloat16 (dtype policy "
    "mixed_bfloat16), or compile(auto_scale_loss=False)"
)


class AlgorithmState(keras.layers.Layer):
    """The part of an optimizer by which Keras and its callbacks save its algorithm's state: .keras and .weights.h5.

    Keras saves a part under the part's name. This one has no variables: the optimizer's own stay those of its class,
    and plain Keras, whose optimizers have no such part, skips it. It is a layer only because Keras can save layers.
    """

    def __init__(self, optimizer: "HasDistribution") -> None:
        super().__init__()
        self._of = (optimizer.algorithm_state_dict, optimizer.load_algorithm_state_dict, optimizer.distribution)

    def save_own_variables(self, store: Any) -> None:
        state = self._of[0]()
        if state:
            store["state"] = np.frombuffer(to_bytes(state), np.uint8)

    def load_own_variables(self, store: Any) -> None:
        # State saved with Adam's moments must not be combined with other moments.
        if "state" in store.keys() and not self._of[2].state_skipped:   # noqa: SIM118  # a store of Keras, no dict
            self._of[1](from_bytes(store["state"].tobytes()))


class HasDistribution:
    """Adds to an optimizer's class the reduction of its gradients and its algorithm's state."""

    _settings: tuple        # further arguments of the distribution's class; set in the subclass
    _distribution_class: type[Any]

    @functools.cached_property      # bypasses __setattr__, where Keras tracks the parts that it saves
    def distribution(self) -> Any:
        """Made on first use, so that from_config() of the class need not know it."""
        return self._distribution_class(self, *self._settings)

    def register_local_var(self, var: Any) -> None:
        """Excludes a variable from the reduction. Its gradient stays this rank's, divided by the number of ranks unless
        scale_local_gradients is False."""
        self.distribution.reduction.register_local(var)

    def set_weight(self, weight: Any) -> None:
        """Makes the next average a weighted one: sum of w_i g_i / sum of w_i over the ranks, instead of equal weights.

            def train_step(self, data):
                self.optimizer.set_weight(keras.ops.shape(data[0])[0])
                return super().train_step(data)

        Args:
            weight: number of samples or tokens that this rank's gradients are the mean over, a number or a scalar
                tensor; 0: this rank adds nothing. All ranks must give it, in each weighted step; with
                backward_passes_per_step it holds for the whole window, and is given in the last pass.
        Raises:
            ValueError: from apply(): op is not Average; the algorithm does not average gradients in every step; a
                graph is traced, and this was called outside of it. On all ranks (on TensorFlow as
                tf.errors.InvalidArgumentError): a weight is negative or not finite, or all are 0.
        """
        self.distribution.reduction.set_weight(weight)

    def algorithm_state_dict(self) -> Any:
        """The algorithm's state on this rank, made of dicts, lists, numbers and bytes; {} if there is none."""
        states = self.distribution.reduction.state_dicts()
        return {"reductions": states} if any(states) else {}

    def load_algorithm_state_dict(self, state: Any) -> None:
        """Restores an algorithm_state_dict(); all ranks must call it, each with its own or all with the same one.

        State that is equal on all ranks is always restored. State of one rank is restored only by that rank, and only
        if the number of ranks is unchanged; else it starts anew on all ranks. {}: changes nothing.
        """
        if state:
            self.distribution.reduction.load_state_dicts(state["reductions"])


class _Distribution:
    """The state of a distributed optimizer besides the attributes of its class.

    Attributes:
        reduction: see _keras/backend.py.
        reduced: the gradients that are being applied have been reduced.
        applied: None, or a function of Keras' operations that becomes the last part of steps that are traced later.
        state_skipped: Keras has skipped the optimizer's state in the file that is being loaded.
    """

    state_skipped = False

    def __init__(self, optimizer, options, passes, average_aggregated):
        self.reduction = make_reduction(options, optimizer, passes)
        self.passes = passes
        self.average_aggregated = average_aggregated
        self.reduced = False
        self.applied: Callable[[], Any] | None = None
        self._counter: keras.Variable | None = None
        self._sums = ByIdentity(self.reduction.native)      # variable -> its sum in this window
        # Variables with a gradient in this window, by id of the native one. Python does not see when graphs run, so
        # entries that tracing made are never removed.
        self._window: dict[int, Any] = {}

    def build(self, variables):
        """Creates the variables for accumulation. They are not the optimizer's: a checkpoint has only the class's own.

        Returns:
            The counter of passes, or None if nothing accumulates.
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
        """Drops accumulated and pending gradients."""
        self.reduction.reset()
        self._window = {}
        for variable in (self._counter, *self._sums.values()):
            if variable is not None:
                variable.assign(ops.zeros_like(variable))

    def apply(self, optimizer, gradients, variables, apply):
        """Reduces the gradients and applies them by `apply`; before the last pass of a window, only accumulates them.

        Args:
            optimizer: built first, since the condition that follows cannot. Its iterations advance if nothing is
                applied.
            variables: None: the optimizer's.
            apply: function of gradients and variables.
        """
        variables = optimizer._trainable_variables if variables is None else list(variables)
        if not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)
            optimizer.built = True
        if self.passes == 1:
            self._apply_reduced(optimizer, gradients, variables, apply)
        else:
            self._accumulate(optimizer, gradients, variables, apply)

    def _accumulate(self, optimizer, gradients, variables, apply):
        counter = self.build(variables)
        by_id = {id(self.reduction.native(variable)): variable for variable in variables}
        self.reduction.check_window(counter, self.passes, [v for key, v in self._window.items() if key not in by_id])
        counter.assign_add(1)
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

    def _apply_reduced(self, optimizer, gradients, variables, apply):
        gradients = self.reduction(gradients, variables)

        def by_optimizer():
            self.reduced = True
            try:
                apply(gradients, variables)
            finally:
                self.reduced = False

        def by_algorithm():
            """The other effects of apply()."""
            for variable in variables:
                if getattr(variable, "constraint", None) is not None:
                    variable.assign(variable.constraint(variable))
            innermost(optimizer)._iterations.assign_add(1)

        update = functools.partial(self.reduction.update, by_optimizer, by_algorithm)
        if self.applied is None:
            update()
        else:
            self.reduction.in_turn(gradients, update, self.applied)


class Distributed(HasDistribution, keras.optimizers.Optimizer):
    """The mixin that DistributedOptimizer puts before the class of the given optimizer."""

    _distribution_class = _Distribution
    built: bool
    loss_scaled = False         # true within a LossScaleOptimizer: the reduced gradients are scaled

    @property
    def algorithm(self) -> Any:
        """The Algorithm that communicates gradients."""
        return self._settings[0].algorithm

    @functools.cached_property      # see HasDistribution
    def algorithm_state(self) -> AlgorithmState:
        """The part of the optimizer in which Keras saves the algorithm's state."""
        return AlgorithmState(self)

    def __deepcopy__(self, memo: Any) -> Any:
        reduced: Any = self.__reduce__()    # Keras copies what it would save: an optimizer of the original class
        return wrap(reduced[0](*reduced[1]), *self._settings)

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.distribution.build(variables)

    def load_own_variables(self, store: Any) -> None:
        super().load_own_variables(store)
        # Then Keras warns and loads nothing, usually because the optimizer has not been built.
        self.distribution.state_skipped = len(store.keys()) != len(self.variables)

    @as_written
    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        apply = super().apply
        gradients = list(grads)
        if self.distribution.reduced or not gradients:      # by a LossScaleOptimizer around this one
            return apply(gradients, trainable_variables)
        return self.distribution.apply(self, gradients, trainable_variables, apply)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        if not self.distribution.reduced:
            raise RuntimeError(NOT_REDUCED.format(name=type(self).__name__, method="_backend_update_step"))
        return super()._backend_update_step(grads, trainable_variables, learning_rate)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> Any:
        if not self.distribution.reduced:
            raise RuntimeError(NOT_REDUCED.format(name=type(self).__name__, method="update_step"))
        return super().update_step(gradient, variable, learning_rate)


# compile() of a model with dtype policy mixed_float16 wraps the given optimizer in a LossScaleOptimizer, which looks
# for infinities in its gradients and applies them conditionally. So they must be reduced before: otherwise ranks would
# take different branches, and some would wait for the others forever.
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
    return inner.distribution.apply(self, gradients, trainable_variables, functools.partial(_scaled_apply, self))


# On torch's backend, Keras 3.16 trains with DistributedDataParallel if torch has a process group.
_make_ddp: Any = getattr(keras.Model, "_initialize_ddp", None)


def _make_ddp_for_others(self):
    """Skips models whose optimizer reduces gradients itself: they would be sent twice, once in full precision."""
    if distribution_of(getattr(self, "optimizer", None)) is not None:
        object.__setattr__(self, "ddp_model", None)
    else:
        _make_ddp(self)


def _adapt_keras():
    """Patches Keras where distributed optimizers cannot adapt it themselves; repeated calls have no further effect."""
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


def distribution_of(optimizer: Any) -> Any:
    """The distribution of the optimizer, or of the one within it; None if it is not distributed."""
    while optimizer is not None and not hasattr(optimizer, "distribution"):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return getattr(optimizer, "distribution", None)


def forget_step(optimizer: Any) -> None:
    """Drops accumulated and pending gradients of a distributed optimizer; does nothing for others."""
    distribution = distribution_of(optimizer)
    if distribution is not None:
        distribution.reset()


def _subclass(base, settings):
    """A class of the same name, which Keras saves as `base`, so that files load without this package."""
    cls = type(base.__name__, (Distributed, base), {
        "__doc__": base.__doc__, "__module__": base.__module__, "__qualname__": base.__qualname__,
        "_settings": settings,
    })
    package, _, name = keras.saving.get_registered_name(base).rpartition(">")
    if package:
        for registered in (cls, base):      # loading finds the last one
            keras.saving.register_keras_serializable(package, name)(registered)
    return cls


def wrap(optimizer: Any, options: GradientOptions, passes: int = 1, average_aggregated: bool = False) -> Any:
    """The distributed optimizer; it shares hyperparameters, variables and state with the given one.

    Args:
        optimizer: keras.Optimizer; use only the result from then on. An optimizer of tf_keras is copied.
        options: GradientOptions, checked.
        passes, average_aggregated: backward_passes_per_step, average_aggregated_gradients.
    Raises:
        ValueError: not an optimizer of Keras, or a distributed one already.
    """
    check_passes(passes)
    if legacy.is_optimizer(optimizer):
        return of_tf_keras().wrap(optimizer, options, passes, average_aggregated)
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
    distribution = wrapped.distribution     # made now, to refuse unsupported algorithms here
    if wrapped.built:
        distribution.build(wrapped._trainable_variables)
    return wrapped


def load_model(filepath: Any, wrap_optimizer: Callable[..., Any], custom_optimizers: Any,
               custom_objects: dict[str, Any] | None) -> Any:
    """keras.models.load_model() with the optimizer wrapped by `wrap_optimizer`, and the saved state.

    From a .keras file also the algorithm's state, if it has any.
    """
    classes = {cls.__name__: cls for cls in custom_optimizers or ()}
    if legacy.in_use():
        return of_tf_keras().load_model(filepath, wrap_optimizer, {**classes, **(custom_objects or {})})
    model = keras.models.load_model(filepath, custom_objects={**classes, **(custom_objects or {})})
    if model.optimizer is not None:
        model.optimizer = wrap_optimizer(model.optimizer)
        options = model.optimizer._settings[0]
        if (options.algorithm.relaxed or options.delay) and zipfile.is_zipfile(filepath):
            model.load_weights(filepath)        # again, now with an algorithm that restores its state
    return model
