"""TensorFlow's Source: the tensors that a step has passed over its bridge, in the bridge's memory.

Weights are passed only for algorithms that read them, and back only for those that write them; Adam's moments only for
those that read them (Algorithm.uses_weights, uses_adam).
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
    """The bridge's indices: gradients have 0, 1, ...; then come weights and the optimizer's variables."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.weight, self.m, self.v = count, 2 * count, 3 * count       # the first index of `count` each
        self.numbers = {"learning rate": 4 * count, "iterations": 4 * count + 1}
        self.decision = 4 * count + 2       # whether the algorithm has updated the weights


class TensorFlowSource(adam.KerasSource, Source):
    """The Source of some variables, for the current step.

    Args:
        variables: tf.Variables, held weakly. optimizer: a Keras optimizer, held weakly, or None.
        passes: the optimizer's backward passes per step.
    Attributes:
        layout: a Layout.
        views: by index, the memory that the bridge has passed in this step.
        passed_beside: how many of them are not gradients.
    """

    def __init__(self, variables: Any, optimizer: Any, passes: int) -> None:
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self._variables = [weakref.ref(variable) for variable in variables]
        self._passes = passes
        self.layout = Layout(len(variables))
        self.views: dict[int, TensorView] = {}
        self.passed_beside = 0
        self._eager_copies: dict[int, Any] = {}     # by index: copies of weights that are read outside of steps

    @property
    def optimizer(self) -> Any:
        """The Keras optimizer, or None."""
        return self._optimizer()

    @property
    def variables(self) -> list:
        """The given variables."""
        return [variable() for variable in self._variables]

    def decide(self) -> None:
        """Records that the algorithm has updated the weights."""
        ffi.cast("int32_t *", self._view(self.layout.decision).dst)[0] = 1

    def gradient(self, index: int) -> Any:
        if index in self.views:
            return self.views[index]
        raise RuntimeError("the previous step was interrupted, so this one is aborted, too: run the step again")

    prepare = _view = gradient

    def weight(self, index: int) -> Any:
        return self._view(self.layout.weight + index) if self.views else self._outside_view(index)

    def weight_written(self, index: int) -> None:
        if index in self._eager_copies:
            self._variables[index]().assign(self._eager_copies.pop(index))

    def _outside_view(self, index):
        """View of a weight while no step runs: in an algorithm's abort()."""
        if not tf.executing_eagerly():
            raise RuntimeError("outside of a step, weights can be read only in eager mode")
        values = self._eager_copies[index] = np.array(self._variables[index]().numpy(), order="C")
        return array_view(values)

    def _moments(self, index):
        return self._view(self.layout.m + index), self._view(self.layout.v + index)

    def _number(self, name):
        return ffi.cast("double *", self._view(self.layout.numbers[name]).dst)[0]

    def discard(self) -> None:
        self.views.clear()
        self.passed_beside = 0
