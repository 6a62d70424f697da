"""One step of some variables: what an algorithm sees of it, in the memory where bridges show it.

    gradients, weights, moments  ->  backward_begins, communicate, before_step, step  ->  the same     exchange()
    the optimizer applies the gradients, unless the algorithm has updated the weights                  update()
    weights                      ->  after_step                                       ->  weights      stepped()

Weights go over the bridge only for algorithms that look at them, and back only for those that write them; Adam's
moments only for those that ask for them. Whether the algorithm or the optimizer updates the weights is known when the
step runs, so the graph has both and a condition: a number that goes over the bridge with the rest.
"""
import weakref
from zlib import crc32

import numpy as np
import tensorflow as tf

from bagua_hvd._keras import adam
from bagua_hvd.algorithms import Algorithm
from bagua_hvd.common.buckets import Member
from bagua_hvd.common.native import ffi
from bagua_hvd.common.reducer import Gradients, Reducer
from bagua_hvd.common.vectors import array_view
from bagua_hvd.tensorflow.bridge import Bridge
from bagua_hvd.tensorflow.dtypes import native_dtype


def native_variable(variable):
    """The tf.Variable behind a variable of Keras, and other things as they are."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def identify(variable):
    """The key by which a variable is known, Keras' or TensorFlow's own."""
    return id(native_variable(variable))


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
        self.shown = self.written or self.updates or overrides("backward_begins")
        self.any = self.shown or self.after


class Step(adam.HasAdam, Gradients):
    """See the module.

    Args:
        options: GradientOptions, checked. variables: tf.Variables, held weakly.
        optimizer: of Keras, held weakly, or None. passes: its backward passes for each step.
        number: see Reducer.
    Attributes:
        places: of the variables in the list whose gradients were asked for, which is the same on all ranks.
    """

    def __init__(self, options, variables, optimizer=None, passes=1, number=None):
        self._count = count = len(variables)
        self._variables = [weakref.ref(variable) for variable in variables]
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self._passes = passes
        self.places = []
        self._looks = Looks(options.algorithm)
        # Gradients are 0, 1, ...; then come:
        self._weight, self._m, self._v = count, 2 * count, 3 * count
        self._numbers = {"learning rate": 4 * count, "iterations": 4 * count + 1}
        self._decision = 4 * count + 2
        self._views = {}            # by index
        self._waiting = []          # gradients that are ready before all the rest is there
        self._shown = 0             # how much of the rest is there
        self._beside = 0            # how much there is
        self._holding = False
        self._outside = {}          # by index: copies of weights that are looked at outside of steps
        self._results = None        # of the exchange that is being traced
        members = [
            Member(variable.name, tuple(variable.shape), native_dtype(variable.dtype.base_dtype))
            for variable in variables
        ]
        self.reducer = Reducer(
            self, members, options.algorithm, options.process_set, 1, options.grouped(variables, identify),
            *options.factors, number=number,
        )
        self._before = Bridge(self._put, self._synchronize)
        self._after = Bridge(self._keep, self._stepped)

    # ------------------------------------------------------------------------------------ while the step runs ----

    def _keep(self, index, view):
        if index in self._views:
            # The last step was given up half way, by an error elsewhere in the graph.
            self.reducer.reset()
        self._views[index] = view

    def _put(self, index, view):
        self._keep(index, view)
        # Algorithms may look at weights when the first gradient is ready, and the graph shows them in any order.
        if index < self._count:
            self._waiting.append(index)
        else:
            self._shown += 1
        if self._shown == self._beside:
            while self._waiting:
                self.reducer.gradient_ready(self._waiting.pop(0))

    def _synchronize(self):
        self._holding = True        # for step(), which comes after the Reducer is done with its views
        try:
            self.reducer.synchronize()
            if self._looks.updates and self.reducer.step():
                ffi.cast("int32_t *", self.view(self._decision).dst)[0] = 1
        finally:
            self._holding = False
            self.discard()
        if not self._looks.after:
            self.reducer.stepped()

    def _stepped(self):
        self.reducer.stepped()
        self.discard()

    def fingerprint(self):
        return crc32(repr(self.places).encode()) % (2**31 - 1)

    def view(self, index):
        if index not in self._views:
            raise RuntimeError("the step before this one was given up half way, and so is this one; the next one works")
        return self._views[index]

    def weight(self, index):
        return self.view(self._weight + index) if self._views else self._outside_view(index)

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
        return adam.Unbuilt(None).adam() if self._optimizer() is None else super().adam()

    def _moment(self, which, index):
        return self.view((self._m if which == "m" else self._v) + index)

    def _number(self, name):
        return ffi.cast("double *", self.view(self._numbers[name]).dst)[0]

    def discard(self):
        if not self._holding:
            self._views.clear()
            self._waiting.clear()
            self._shown = 0

    # -------------------------------------------------------------------------------- when the step is traced ----

    def _moments(self, variables):
        """By index: the optimizer's variables."""
        pairs = [adam.moments(self._optimizer(), variable) for variable in variables]
        ms, vs = ([native_variable(pair[place]) for pair in pairs] for place in (0, 1))
        return {**dict(enumerate(ms, self._m)), **dict(enumerate(vs, self._v))}

    def _tensors_beside(self, variables):
        """By index: what goes over the bridge beside the gradients."""
        tensors = {}
        if self._looks.shown:
            tensors.update((self._weight + index, variable.read_value()) for index, variable in enumerate(variables))
        if self._adam is not None:
            tensors.update((index, moment.read_value()) for index, moment in self._moments(variables).items())
            optimizer = self._optimizer()
            for name, value in (("learning rate", adam.learning_rate(optimizer)), ("iterations", optimizer.iterations)):
                tensors[self._numbers[name]] = tf.cast(tf.convert_to_tensor(value), tf.float64)
        if self._looks.updates:
            tensors[self._decision] = tf.zeros([], tf.int32)
        return tensors

    def exchange(self, gradients, variables):
        """The reduced gradients, dense, in their order."""
        tensors = self._tensors_beside(variables)
        self._beside = len(tensors)
        # Backward passes yield the last ones first, and in eager mode this is the order in which they travel.
        tensors.update((index, gradients[index]) for index in range(self._count - 1, -1, -1))
        results = dict(zip(tensors, self._before.exchange(list(tensors.values()), list(tensors)), strict=True))
        reduced = [results.pop(index) for index in range(self._count)]
        if self._looks.updates:
            self._results = results
        if not self._looks.written:
            return reduced
        written = [variable.assign(results[self._weight + index]) for index, variable in enumerate(variables)]
        with tf.control_dependencies(_operations(written)):
            return [tf.identity(gradient) for gradient in reduced]

    def update(self, variables, apply, instead):
        """The optimizer's step, apply(); or, where the algorithm has updated the weights, instead().

        Returns:
            What apply() returns; with algorithms that may update the weights, something that comes after either.
        """
        if not self._looks.updates:
            return apply()
        results, self._results = self._results, None

        def by_algorithm():
            for index, variable in enumerate(variables):
                variable.assign(results[self._weight + index])
            if self._adam is not None:
                for index, moment in self._moments(variables).items():
                    moment.assign(results[index])
            instead()
            return tf.constant(True)

        def by_optimizer():
            apply()
            return tf.constant(False)

        return tf.cond(tf.not_equal(results[self._decision], 0), by_algorithm, by_optimizer)

    def stepped(self, variables):
        """The optimizer has written the variables. Returns the operations that write them again; [] in eager mode."""
        if not self._looks.after:
            return []
        weights = self._after.exchange(
            [variable.read_value() for variable in variables], range(self._weight, self._weight + self._count)
        )
        return _operations([variable.assign(weight) for variable, weight in zip(variables, weights, strict=True)])


def _operations(assigned):
    return [] if tf.executing_eagerly() else [variable.op for variable in assigned]
