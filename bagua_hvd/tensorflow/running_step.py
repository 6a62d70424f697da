"""A step while it runs: what its algorithm sees, in the memory where bridges show it. See step.py for how it is traced.

Weights go over the bridge only for algorithms that look at them, and back only for those that write them; Adam's
moments only for those that ask for them.
"""
import weakref
from zlib import crc32

import numpy as np
import tensorflow as tf

from bagua_hvd._keras import adam
from bagua_hvd.algorithms import Algorithm
from bagua_hvd.core.native import ffi
from bagua_hvd.core.vectors import array_view
from bagua_hvd.reduction.gradients import Gradients
from bagua_hvd.reduction.reducer import Reducer
from bagua_hvd.tensorflow.bridge import Bridge
from bagua_hvd.tensorflow.dtypes import native_dtype
from bagua_hvd.tensorflow.variables import native_variable
from bagua_hvd.training.buckets import Member

NOT_SHOWN = (
    "{name} looks at {what}, which TensorFlow shows only to algorithms that announce it: {remedy}"
)
_REMEDIES = {
    "weights": "set reads_weights = True in its class",
    "the optimizer's Adam": "call model.adam() in its prepare()",
}


class Looks:
    """What of a step an algorithm, or None, has to do with.

    Attributes:
        shown: it reads weights before the optimizer's step. written: it writes them there. after: it has something to
            do after the step. updates: it may update the weights in the optimizer's place. any: one of these.
    """

    def __init__(self, algorithm):
        def overrides(hook):
            return getattr(type(algorithm or Algorithm()), hook) is not getattr(Algorithm, hook)

        self.written = overrides("before_step")
        self.updates = overrides("step")
        self.after = overrides("after_step")
        reads = algorithm is not None and algorithm.reads_weights
        self.shown = self.written or self.updates or reads or overrides("backward_begins")
        self.any = self.shown or self.after


class Layout:
    """By which indices things go over the bridge: gradients by 0, 1, ...; then weights and what an optimizer has."""

    def __init__(self, count):
        self.count = count
        self.weight, self.m, self.v = count, 2 * count, 3 * count       # the first of as many
        self.numbers = {"learning rate": 4 * count, "iterations": 4 * count + 1}
        self.decision = 4 * count + 2       # whether the algorithm has updated the weights


class RunningStep(adam.HasAdam, Gradients):
    """All steps of some variables, one after the other.

    Args:
        options: GradientOptions, checked. variables: tf.Variables, held weakly.
        optimizer: of Keras, held weakly, or None. passes: its backward passes for each step.
        number: see Reducer.
    Attributes:
        reducer. looks: what of it the algorithm has to do with. layout: a Layout.
        before, after: the Bridges before and after the optimizer's step.
        places: of the variables in the list whose gradients were asked for, which is the same on all ranks.
        beside: indices of what goes over the first bridge beside the gradients.
    """

    def __init__(self, options, variables, optimizer=None, passes=1, number=None):
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self.looks = Looks(options.algorithm)
        self.layout = Layout(len(variables))
        self.places = []
        self.beside = frozenset()
        self._variables = [weakref.ref(variable) for variable in variables]
        self._passes = passes
        self._views = {}            # by index
        self._waiting = []          # gradients that are ready before all that is beside them is there
        self._shown = 0             # how much of that is there
        self._holding = False
        self._outside = {}          # by index: copies of weights that are looked at outside of steps
        members = [
            Member(variable.name, tuple(variable.shape), native_dtype(variable.dtype.base_dtype))
            for variable in variables
        ]
        self.reducer = Reducer(
            self, members, options.algorithm, options.process_set, 1, options.grouped(variables, native_variable),
            *options.factors, number=number,
        )
        self.before = Bridge(self._put, self._synchronize)
        self.after = Bridge(self._keep, self._stepped)

    @property
    def optimizer(self):
        """Keras' optimizer, or None."""
        return self._optimizer()

    # --------------------------------------------------------------------------------------- what bridges call ----

    def _keep(self, index, view):
        if index in self._views:
            # The last step was given up half way, by an error elsewhere in the graph.
            self.reducer.reset()
        self._views[index] = view

    def _put(self, index, view):
        self._keep(index, view)
        # Algorithms may look at weights when the first gradient is ready, and the graph shows them in any order.
        if index < self.layout.count:
            self._waiting.append(index)
        else:
            self._shown += 1
        if self._shown == len(self.beside):
            ready, self._waiting = self._waiting, []
            for waiting in ready:
                self.reducer.gradient_ready(waiting)

    def _synchronize(self):
        self._holding = True        # for step(), which comes after the Reducer is done with its views
        try:
            self.reducer.synchronize()
            if self.reducer.step():     # only algorithms that update
                ffi.cast("int32_t *", self.view(self.layout.decision).dst)[0] = 1
        finally:
            self._holding = False
            self.discard()
        if not self.looks.after:
            self.reducer.stepped()

    def _stepped(self):
        self.reducer.stepped()
        self.discard()

    # --------------------------------------------------------------------------------- what the Reducer asks for ----

    def fingerprint(self):
        return crc32(repr(self.places).encode()) % (2**31 - 1)

    def view(self, index):
        if index in self._views:
            return self._views[index]
        if index >= self.layout.count and index not in self.beside:
            what = "weights" if index < self.layout.m else "the optimizer's Adam"
            name = type(self.reducer.algorithm).__name__
            raise ValueError(NOT_SHOWN.format(name=name, what=what, remedy=_REMEDIES[what]))
        raise RuntimeError("the step before this one was given up half way, and so is this one; the next one works")

    def weight(self, index):
        return self.view(self.layout.weight + index) if self._views else self._outside_view(index)

    def weight_written(self, index):
        if index in self._outside:
            self._variables[index]().assign(self._outside.pop(index))

    def _outside_view(self, index):
        """A weight where no step runs: in an algorithm's abort()."""
        if not tf.executing_eagerly():
            raise RuntimeError("outside of a step, weights can be looked at in eager mode only, not within a graph")
        values = self._outside[index] = np.array(self._variables[index]().numpy(), order="C")
        return array_view(values)

    def adam(self):
        return adam.Unbuilt(None).adam() if self.optimizer is None else super().adam()

    def _moment(self, which, index):
        return self.view((self.layout.m if which == "m" else self.layout.v) + index)

    def _number(self, name):
        return ffi.cast("double *", self.view(self.layout.numbers[name]).dst)[0]

    def discard(self):
        if not self._holding:
            self._views = {}
            self._waiting = []
            self._shown = 0
