"""TensorFlow's Source: what a step has brought over its bridge, in the memory where that shows it.

Weights go over the bridge only for algorithms that look at them, and back only for those that write them; Adam's
moments only for those that look at them (Algorithm.uses_weights, uses_adam).
"""
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from bagua_hvd._keras import adam
from bagua_hvd.core.native import TensorView, ffi
from bagua_hvd.core.vectors import array_view
from bagua_hvd.training.source import Source


class Layout:
    """By which indices things go over the bridge: gradients by 0, 1, ...; then weights and what an optimizer has."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.weight, self.m, self.v = count, 2 * count, 3 * count       # the first of as many
        self.numbers = {"learning rate": 4 * count, "iterations": 4 * count + 1}
        self.decision = 4 * count + 2       # whether the algorithm has updated the weights


class TensorFlowSource(adam.KerasSource, Source):
    """Of some variables, in whatever step is under way.

    Args:
        variables: tf.Variables, held weakly. optimizer: of Keras, held weakly, or None.
        passes: its backward passes for each step.
    Attributes:
        layout: a Layout.
        beside: indices of what goes over the bridge beside the gradients.
        views: by index, the memory of what the bridge has brought in this step.
        held: discard() does nothing.
    """

    def __init__(self, variables: Any, optimizer: Any, passes: int) -> None:
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self._variables = [weakref.ref(variable) for variable in variables]
        self._passes = passes
        self.layout = Layout(len(variables))
        self.beside: frozenset[int] = frozenset()
        self.views: dict[int, TensorView] = {}
        self.held = False
        self._waiting: list[int] = []          # gradients that are there before all that is beside them is
        self._shown = 0             # how much of that is there
        self._outside: dict[int, Any] = {}          # by index: copies of weights that are looked at outside of steps

    @property
    def optimizer(self) -> Any:
        """Keras' optimizer, or None."""
        return self._optimizer()

    @property
    def variables(self) -> list:
        """Those that it was given."""
        return [variable() for variable in self._variables]

    # --------------------------------------------------------------------------------------- what bridges bring ----

    def put(self, index: int, view: TensorView) -> Any:
        """The memory of `index`, before the optimizer's step. Returns the gradients that are ready now.

        Algorithms may look at weights when the first gradient is ready, and the graph shows them in any order.
        """
        self.views[index] = view
        if index < self.layout.count:
            self._waiting.append(index)
        else:
            self._shown += 1
        if self._shown < len(self.beside):
            return ()
        ready, self._waiting = self._waiting, []
        return ready

    def decide(self) -> None:
        """The algorithm has updated the weights."""
        ffi.cast("int32_t *", self._view(self.layout.decision).dst)[0] = 1

    # --------------------------------------------------------------------------------- what the Reducer asks for ----

    def gradient(self, index: int) -> Any:
        if index in self.views:
            return self.views[index]
        raise RuntimeError("the step before this one was given up half way, and so is this one; the next one works")

    prepare = _view = gradient

    def finish(self) -> None:
        pass

    def weight(self, index: int) -> Any:
        return self._view(self.layout.weight + index) if self.views else self._outside_view(index)

    def weight_written(self, index: int) -> None:
        if index in self._outside:
            self._variables[index]().assign(self._outside.pop(index))

    def _outside_view(self, index):
        """A weight where no step runs: in an algorithm's abort()."""
        if not tf.executing_eagerly():
            raise RuntimeError("outside of a step, weights can be looked at in eager mode only, not within a graph")
        values = self._outside[index] = np.array(self._variables[index]().numpy(), order="C")
        return array_view(values)

    def _moment(self, which, index):
        return self._view((self.layout.m if which == "m" else self.layout.v) + index)

    def _number(self, name):
        return ffi.cast("double *", self._view(self.layout.numbers[name]).dst)[0]

    def discard(self) -> None:
        if not self.held:
            self.views = {}
            self._waiting = []
            self._shown = 0
