"""Reduction of gradients: what is the same on all backends of Keras, and for TensorFlow's tapes.

    gradients = reduction(gradients, variables)     reduced, in their order; None: see `fills_in`
    reduction.update(apply, instead)                apply(), or instead() where the algorithm has updated the weights
    reduction.stepped()                             the weights are new

Reducers have numbers, by which ranks match what they communicate. They are made when a step is traced, or run, for the
first time: one for each list of variables, which ranks meet in the same order, however often they trace.
"""
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from bagua_hvd._keras.adam import Unbuilt
from bagua_hvd.core.identity import ByIdentity
from bagua_hvd.job.basics import Adasum
from bagua_hvd.reduction.options import GradientOptions
from bagua_hvd.reduction.weight import check_weighable
from bagua_hvd.training.model import Model

UPDATES_ALL = "{name} updates all weights itself: it does not go with variables that are not reduced"
NOT_WEIGHTED = ("a weighted average needs a dense gradient of a variable that is reduced, and there is none: pass "
                "sparse_as_dense=True")


class Reduction(ABC):
    """Reduces lists of gradients; a backend says how.

    A step is an object of the backend with

        reducer, source             of these variables; source.places: see __call__()
        exchange(gradients)         the reduced gradients
        factor(weight)              what multiplies this rank's gradients in a weighted average
        update(apply, instead), stepped()

    Args:
        options: GradientOptions, checked.
        optimizer: of Keras, whose steps are made by update(); held weakly. passes: its backward passes for each step.
    Raises:
        ValueError: the algorithm cannot serve the optimizer.
    Attributes:
        fills_in: a step's exchange() takes None, for which zeros travel; else None stays None, and variables with and
            without a gradient are other steps.
    """

    fills_in = False

    def __init__(self, options: GradientOptions, optimizer: Any = None, passes: int = 1) -> None:
        self.options = options
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self._passes = passes
        self._local = ByIdentity(self.native)       # variables that are not reduced
        self._has_local = False
        self._used: Any = None      # the step under way
        # ids of variables -> step, and weak references that end the entry with the first of them
        self._steps: dict[Any, Any] = {}
        self._made: list[Any] = []             # weak references to Reducers, in the order in which they were made
        self._promised: list[int] = []         # numbers of those that are made next
        self._loaded: list[Any] = []           # their state, from a checkpoint
        self._observer: Any = None             # of all of them
        if options.algorithm is not None:
            options.algorithm.prepare(Model("unused", Unbuilt(optimizer), options.process_set, options.algorithm))

    @staticmethod
    @abstractmethod
    def native(variable: Any) -> Any:
        """The backend's variable behind one of Keras; others as they are."""

    @abstractmethod
    def dense(self, gradient: Any) -> Any:
        """A gradient that can be added up."""

    @abstractmethod
    def take(self, sums: Any) -> list:
        """The values of variables, which are zero from then on, also where what follows fails."""

    @abstractmethod
    def _make_step(self, variables, number):
        """A step of these variables; number: see Reducer."""

    @abstractmethod
    def _adasum(self, gradients):
        """Their Adasum."""

    @abstractmethod
    def _times(self, gradient, factor):
        """Their product; 0 where the factor is, whatever the gradient."""

    def observe(self, observer: Any) -> None:
        """Has all Reducers, those that are made later too, tell the observer of steps; see Reducer."""
        self._observer = observer
        for reducer in self.reducers():
            reducer.observer = observer

    def in_turn(self, gradients: Any, first: Callable[[], Any], then: Callable[[], Any]) -> None:
        """Calls both; in a graph, what `first` makes runs after the gradients, and what `then` makes after all that."""
        first()
        then()

    def traces(self) -> bool:
        """Whether a graph is being made, that runs later and again."""
        return False

    def _size(self, gradient):
        """What a gradient that is not reduced is divided by."""
        return self.options.process_set.size()

    def _divided(self, gradient):
        return gradient / self._size(gradient)

    def register_local(self, variable: Any) -> None:
        """From now on this one is not reduced."""
        self._local.add(variable)
        self._has_local = True

    def reset(self) -> None:
        """Forgets what is pending."""
        for step, _ in list(self._steps.values()):
            step.reducer.reset()

    # --------------------------------------------------------------------------------------------------- steps ----

    def __call__(self, gradients, variables, local=(), weight=None):
        """The reduced gradients, a list in their order.

        Args:
            gradients: of the backend, or None. variables: what they are gradients of.
            local: further variables that are not reduced.
            weight: None, or a number or scalar: samples that this rank's gradients are the mean over.
        Raises:
            ValueError: a weight, and gradients are not averaged in every step, or there are none of variables.
        """
        self._used = None
        gradients = list(gradients)
        if not self.options.communicates:
            return gradients
        if weight is not None:
            gradients = self._weighted(gradients, variables, local, weight)
        places = self._places(gradients, variables, local)
        for index, gradient in enumerate(gradients):
            if gradient is None and not self.fills_in:
                places.pop(index, None)
        travelling, variables = list(map(gradients.__getitem__, places)), list(variables)
        reduced = self._reduce(travelling, list(map(variables.__getitem__, places)), list(places.values()))
        for index, gradient in zip(places, reduced, strict=True):
            gradients[index] = gradient
        return gradients

    def _weighted(self, gradients, variables, local, weight):
        check_weighable(self.options.algorithm)
        pairs = [(gradient, variable) for gradient, variable in zip(gradients, variables, strict=True)
                 if (gradient is not None or self.fills_in) and variable not in self._local and variable not in local]
        bucketed = [variable for gradient, variable in pairs if not self._travels_alone(gradient, variable)]
        if not bucketed:
            raise ValueError(NOT_WEIGHTED)
        factor = self._step_of(bucketed).factor(weight)
        return [gradient if gradient is None else self._times(gradient, factor) for gradient in gradients]

    def _travels_alone(self, gradient, variable):
        """Whether a gradient goes by an operation of its own, not by a step."""
        return False

    def _places(self, gradients, variables, local):
        """By index: the place among all variables that are reduced, with or without a gradient. Others are scaled."""
        if not self._has_local and not local:
            return dict(enumerate(range(len(gradients))))
        places: dict[int, int] = {}
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if variable not in self._local and variable not in local:
                places[index] = len(places)
            elif gradient is not None:
                if self.options.algorithm is not None and self.options.algorithm.replaces_step:
                    raise ValueError(UPDATES_ALL.format(name=type(self.options.algorithm).__name__))
                if self.options.scale_local_gradients:
                    gradients[index] = self._divided(gradient)
        return places

    def _reduce(self, gradients, variables, places):
        if not gradients:
            return []
        if self.options.op == Adasum:
            return self._adasum(gradients)
        step = self._used = self._step_of(variables)
        step.source.places = places
        return step.exchange(gradients)

    def _step_of(self, variables):
        key = tuple(map(id, variables))
        known = self._steps.get(key)
        return known[0] if known else self._new_step(key, variables)

    def _new_step(self, key, variables):
        step = self._make_step(variables, self._promised.pop(0) if self._promised else None)
        steps = self._steps
        steps[key] = step, [weakref.ref(variable, lambda _: steps.pop(key, None)) for variable in variables]
        self._made = [each for each in self._made if each() is not None] + [weakref.ref(step.reducer)]
        step.reducer.observer = self._observer
        if self._loaded:
            step.reducer.load_state_dict(self._loaded.pop(0))
        return step

    def update(self, apply: Callable[..., Any], instead: Callable[..., Any]) -> Any:
        """Calls apply(), which applies the gradients that were reduced last; or, where the algorithm has updated the
        weights, instead(). Returns what comes after either, where that is an operation of a graph."""
        return apply() if self._used is None else self._used.update(apply, instead)

    def stepped(self) -> Any:
        """The gradients have been applied. Returns operations that have to run for the algorithm, in graphs."""
        step, self._used = self._used, None
        return [] if step is None else step.stepped()

    # ------------------------------------------------------------------------------------- numbers and their state ----

    def reducers(self) -> list:
        """Those that live, in the order in which they were made."""
        return [reducer for reducer in (reference() for reference in self._made) if reducer is not None]

    @property
    def number(self) -> Any:
        """Those of its Reducers, made or to be made; see share_numbers() in reduction/numbers.py."""
        return [reducer.number for reducer in self.reducers()] + self._promised

    def renumber(self, numbers: Any) -> None:
        """Changes them, and forgets what is pending."""
        made = self.reducers()
        for reducer, number in zip(made, numbers, strict=False):
            reducer.reset()
            reducer.renumber(number)
        self._promised = numbers[len(made):]

    def state_dicts(self) -> Any:
        """Those of its Reducers, made or to be made; see Reducer.state_dict()."""
        return [reducer.state_dict() for reducer in self.reducers()] + self._loaded

    def load_state_dicts(self, states: Any) -> None:
        """Takes up state_dicts(), and forgets what is pending."""
        made = self.reducers()
        for reducer, state in zip(made, states, strict=False):
            reducer.reset()
            reducer.load_state_dict(state)
        self._loaded = list(states[len(made):])
