"""Reduction of gradients: the part common to all backends of Keras and TensorFlow's tapes.

    gradients = reduction(gradients, variables)     reduced, in the given order; None: see `fills_in`
    reduction.update(apply, instead)                apply(), or instead() if the algorithm has updated the weights

Ranks match operations by the numbers of Reducers. A Reducer is made when a step is first traced or run: one for each
list of variables, in the same order on all ranks, however often they trace. For ranks that join later see
reduction/agreement.py.
"""
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from bagua_hvd._keras.adam import Unbuilt
from bagua_hvd.core.identity import ByIdentity
from bagua_hvd.job.basics import Adasum
from bagua_hvd.reduction.options import GradientOptions
from bagua_hvd.reduction.weight import check_alone, check_weighable
from bagua_hvd.training.model import Model

UPDATES_ALL = "{name} updates all weights itself: it cannot be combined with unreduced variables"
WEIGHT_OUTSIDE = (
    "set_weight() was called in eager mode, and the gradients are applied in a graph, which would use that one "
    "value in every step: call it in train_step(), where the step is traced"
)
NOT_WEIGHTED = ("a weighted average needs a dense gradient of a variable that is reduced, and there is none: pass "
                "sparse_as_dense=True")


class Reduction(ABC):
    """Reduces lists of gradients; backends implement it.

    A step is an object of the backend with

        reducer                     of these variables
        exchange(gradients, places) the reduced gradients; places: see KerasSource
        factor_of(weight)           the factor of this rank's gradients in a weighted average
        has_update                  whether there is more to do when the gradients are applied:
        update(apply, instead)      see Reduction.update()

    Args:
        options: GradientOptions, checked.
        optimizer: a Keras one, whose steps update() makes; held weakly. passes: its backward passes per step.
    Raises:
        ValueError: the algorithm cannot serve the optimizer.
    Attributes:
        fills_in: a step's exchange() accepts None and sends zeros for it; else None stays None, and each set of
            variables with a gradient is another step.
    """

    fills_in = False

    def __init__(self, options: GradientOptions, optimizer: Any = None, passes: int = 1) -> None:
        self.options = options
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self._passes = passes
        self._local: Any = ()       # variables that are not reduced
        self._used: Any = None      # the current step
        self._weight: tuple[Any, bool] | None = None    # (weight of the next average, was it set in a trace?)
        self._steps: dict[Any, Any] = {}        # by ids of variables, all of which live
        self._made: list[Any] = []              # weak references to Reducers, in the order of creation
        self._loaded: list[Any] = []            # state for the next ones, from a checkpoint
        self._observer: Any = None              # of all Reducers
        if options.algorithm is not None:
            options.algorithm.prepare(Model("unused", Unbuilt(optimizer), options.process_set, options.algorithm))

    @staticmethod
    @abstractmethod
    def native(variable: Any) -> Any:
        """The backend's variable behind a Keras variable; others unchanged."""

    @abstractmethod
    def dense(self, gradient: Any) -> Any:
        """A gradient that can be accumulated."""

    @abstractmethod
    def take(self, sums: Any) -> list:
        """The values of variables, which are then set to zero, even if a later step fails."""

    @abstractmethod
    def _make_step(self, variables):
        """A step of these variables."""

    @abstractmethod
    def _adasum(self, gradients):
        """The Adasum of the gradients."""

    @abstractmethod
    def _times(self, gradient, factor):
        """Their product; 0 if the factor is 0, whatever the gradient."""

    def observe(self, observer: Any) -> None:
        """Makes all Reducers, also later ones, report steps to the observer; see Reducer."""
        self._observer = observer
        for reducer in self.reducers():
            reducer.observer = observer

    def in_turn(self, gradients: Any, first: Callable[[], Any], then: Callable[[], Any]) -> None:
        """Calls both; in a graph, ops of `first` run after the gradients, and ops of `then` after those."""
        first()
        then()

    def traces(self) -> bool:
        """Whether a graph is being traced, which runs later and repeatedly."""
        return False

    def check_window(self, counter: Any, passes: int, others: list) -> None:  # noqa: B027  (only graphs lose any)
        """Called in each pass of a window of backward_passes_per_step.

        Args:
            counter: the variable that counts passes; None: it is not made yet. passes: of a window.
            others: variables with a gradient in this window that are not among those of this pass.
        Raises:
            ValueError: a graph is being traced, which would lose these gradients.
        """

    def _divided(self, gradient):
        """A gradient that is not reduced, divided by the number of ranks."""
        return gradient / self.options.process_set.size()

    def register_local(self, variable: Any) -> None:
        """Excludes the variable from the reduction from now on."""
        self._local = self._local or ByIdentity(self.native)
        self._local.add(variable)

    def set_weight(self, weight: Any) -> None:
        """Gives the next call this weight, for callers that do not make it themselves."""
        self._weight = weight, self.traces()

    def reset(self) -> None:
        """Drops pending gradients."""
        for step in list(self._steps.values()):
            step.reducer.reset()

    # --------------------------------------------------------------------------------------------------- steps ----

    def __call__(self, gradients, variables, local=(), weight=None):
        """Returns the reduced gradients, a list in the given order.

        Args:
            gradients: of the backend, or None. variables: their variables.
            local: further variables that are not reduced.
            weight: None, or a number or scalar: number of samples that this rank's gradients are the mean over.
        Raises:
            ValueError: a weight is given, but gradients are not averaged in every step, or no variable has one; or the
                weight is wrong, or was set outside of the graph that is being traced.
        """
        self._used = None
        if self._weight is not None:
            (weight, traced), self._weight = self._weight, None
            if self.traces() and not traced:
                raise ValueError(WEIGHT_OUTSIDE)
        gradients = list(gradients)
        if not self.options.communicates:
            return gradients if weight is None else self._checked(gradients, weight)
        if weight is not None:
            gradients = self._weighted(gradients, variables, local, weight)
        places, variables = self._places(gradients, variables, local), list(variables)
        if not places:
            return gradients
        bucketed = list(map(gradients.__getitem__, places))
        if self.options.op == Adasum:
            reduced = self._adasum(bucketed)
        else:
            step = self._step_of(list(map(variables.__getitem__, places)))
            self._used = step if step.has_update else None
            reduced = step.exchange(bucketed, list(places.values()))
        for index, gradient in zip(places, reduced, strict=True):
            gradients[index] = gradient
        return gradients

    def _weighted(self, gradients, variables, local, weight):
        check_weighable(self.options.algorithm)
        bucketed = [variable for gradient, variable in zip(gradients, variables, strict=True)
                    if (gradient is not None or self.fills_in) and self._has_bucket(gradient, variable)
                    and not self._is_local(variable, local)]
        if not bucketed:
            raise ValueError(NOT_WEIGHTED)
        factor = self._step_of(bucketed).factor_of(weight)
        return [gradient if gradient is None else self._times(gradient, factor) for gradient in gradients]

    def _checked(self, gradients, weight):
        """The gradients of a rank that reduces nothing, unless its weight is wrong."""
        check_alone(weight)
        return gradients

    def _has_bucket(self, gradient, variable):
        """Whether a gradient is communicated by a step; else by _reduce_alone()."""
        return True

    def _reduce_alone(self, gradient, name):
        raise NotImplementedError

    def _places(self, gradients, variables, local):
        """index -> place among all reduced variables, for a step's gradients. Replaces the other gradients."""
        place, places = 0, {}
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if self._is_local(variable, local):
                if gradient is not None:
                    gradients[index] = self._left_local(gradient)
                continue
            if gradient is None and not self.fills_in:
                pass
            elif self._has_bucket(gradient, variable):
                places[index] = place
            else:
                gradients[index] = self._reduce_alone(gradient, f"gradient.{place}")
            place += 1
        return places

    def _is_local(self, variable, local):
        """Whether the gradient of this variable is not reduced."""
        return variable in self._local or variable in local

    def _left_local(self, gradient):
        """A gradient that is not reduced."""
        if self.options.algorithm is not None and self.options.algorithm.replaces_step:
            raise ValueError(UPDATES_ALL.format(name=type(self.options.algorithm).__name__))
        return self._divided(gradient) if self.options.scale_local_gradients else gradient

    def _step_of(self, variables):
        key, steps = tuple(map(id, variables)), self._steps
        if key in steps:
            return steps[key]
        step = steps[key] = self._make_step(variables)
        step.variables_alive = [weakref.ref(variable, lambda _: steps.pop(key, None)) for variable in variables]
        self._made = [each for each in self._made if each() is not None] + [weakref.ref(step.reducer)]
        step.reducer.observer = self._observer
        self._load(step.reducer)
        return step

    def update(self, apply: Callable[..., Any], instead: Callable[..., Any]) -> Any:
        """Applies the gradients that were reduced last by apply(); if the algorithm has updated the weights, calls
        instead(). Then the algorithm acts after the step. In a graph, returns an operation that follows all this."""
        step, self._used = self._used, None
        return apply() if step is None else step.update(apply, instead)

    # ------------------------------------------------------------------------------------ Reducers and their state ----

    def reducers(self) -> list:
        """The living ones, in the order of creation."""
        return [reducer for reducer in (reference() for reference in self._made) if reducer is not None]

    def state_dicts(self) -> Any:
        """The states of its Reducers, existing and future ones; see Reducer.state_dict()."""
        states = [(reducer.shapes, reducer.state_dict()) for reducer in self.reducers()]
        return [{**state, "shapes": shapes} for shapes, state in states if state] + self._loaded

    def load_state_dicts(self, states: Any) -> None:
        """Restores state_dicts(), and drops pending gradients."""
        self._loaded = list(states)
        for reducer in self.reducers():
            self._load(reducer)

    def _load(self, reducer):
        """Restores the first state that was loaded for variables of these shapes; files of older versions have none.

        Names would not do, since load_model() of Keras changes them.
        """
        fitting = [place for place, state in enumerate(self._loaded) if state.get("shapes") in (None, reducer.shapes)]
        if fitting:
            reducer.reset()
            reducer.load_state_dict(self._loaded.pop(fitting[0]))
