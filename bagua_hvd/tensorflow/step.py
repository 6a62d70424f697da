"""A training step of some variables: ops that pass it to its algorithm and take back the results, and their callbacks.

    gradients, weights, moments  ->  backward_begins, communicate, before_step, step  ->  the same     exchange()
    the optimizer applies the gradients, unless the algorithm has updated the weights                  update()
    weights                      ->  after_step                                       ->  weights      update()

Both trace these ops, or run them in eager mode. At run time Bridges call the functions at the end of the class,
and the Step holds the tensors that they passed. Only then is it known whether the algorithm or the optimizer updates
the weights, so the graph has both and a condition on a number that is passed over the bridge as well.

Weights are passed only for algorithms that read them, and back only for those that write them; Adam's moments only for
those that read them (Algorithm.uses_weights, uses_adam).
"""
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from bagua_hvd._keras import adam
from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.core.native import TensorView, ffi
from bagua_hvd.core.vectors import array_view
from bagua_hvd.job.process_sets import registered_id
from bagua_hvd.reduction.options import GradientOptions
from bagua_hvd.reduction.reducer import Reducer
from bagua_hvd.reduction.weight import Weight
from bagua_hvd.tensorflow.bridge import Bridge
from bagua_hvd.tensorflow.collective_ops import allreduce
from bagua_hvd.tensorflow.compression import Compression
from bagua_hvd.tensorflow.graphs import native_variable
from bagua_hvd.tensorflow.native_ops import native_dtype
from bagua_hvd.training.buckets import Member
from bagua_hvd.training.source import Source

NOT_LINEAR = (
    "gradients that were reduced with {what} cannot be differentiated again: take them from a plain tf.GradientTape, "
    "and reduce those of the outer tape"
)


class Uses:
    """The parts of a step that an algorithm (or None) declares to use, with a given Keras optimizer (or None).

    Attributes:
        shown: it reads weights before the optimizer's step. written: it writes them there. after: it reads and writes
            them after the step. updates: it may update them instead of the optimizer. any: one of these.
        adam: it reads the optimizer's Adam. variance: it sets Adam's variance before its step. tf_keras may reduce
            gradients before a variance exists: there only if the algorithm reads weights.
    """

    def __init__(self, algorithm: Algorithm, optimizer: Any) -> None:
        uses = set() if algorithm is None else set(algorithm.uses_weights)
        self.written = "before_step" in uses
        self.after = "after_step" in uses
        self.updates = algorithm is not None and algorithm.replaces_step
        self.shown = bool(uses - {"after_step"}) or self.updates
        self.any = self.shown or self.after
        self.variance = algorithm is not None and algorithm.shares_variance and adam.is_served(
            optimizer, tf_keras=self.any)
        self.adam = self.variance or (algorithm is not None and algorithm.uses_adam)


class Step(adam.KerasSource, Source):
    """All steps of some variables, one after the other; to their Reducer, the Source of the current one.

    Args:
        options: GradientOptions, checked. variables: tf.Variables, held weakly.
        optimizer: a Keras one, held weakly, or None. passes: its backward passes per step.
    Attributes:
        reducer, has_update: see Reduction. uses: the parts that the algorithm uses.
    """

    def __init__(self, options: GradientOptions, variables: Any, optimizer: Any = None, passes: int = 1) -> None:
        self.uses = Uses(options.algorithm, optimizer)
        self.has_update = self.uses.any
        self._options = options
        self._compression = options.compression or Compression.none
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self._variables = [weakref.ref(variable) for variable in variables]
        self._passes = passes
        # A bridge's indices: gradients have 0, 1, ...; then come weights and the optimizer's variables.
        self._count = count = len(variables)
        self._weights_at, self._m_at, self._v_at = count, 2 * count, 3 * count      # the first index of `count` each
        self._numbers_at = {"learning rate": 4 * count, "iterations": 4 * count + 1}
        self._decision_at = 4 * count + 2       # whether the algorithm has updated the weights
        self._views: dict[int, TensorView] = {}     # by index, the memory that the bridge has passed in this step
        self._passed_beside = 0     # how many of them are not gradients
        self._count_beside = 0      # the number of tensors that are passed with the gradients
        self._eager_copies: dict[int, Any] = {}     # by index: copies of weights that are read outside of steps
        members = [
            Member(variable.name, tuple(variable.shape), native_dtype(variable.dtype.base_dtype))
            for variable in variables
        ]
        self.reducer = Reducer(
            self, members, options.algorithm, options.process_set, 1,
            options.grouped(variables, native_variable), **options.reducer_arguments,
        )
        self._before = Bridge(self._put, self._synchronize, self._differentiate)
        self._after = Bridge(self._views.__setitem__, self._stepped)
        self._weighing = Bridge(self._put_weight, self._make_factor)
        self._weight_view: Any = None
        self._weight: Weight | None = None      # the last one
        self._results: dict[int, tf.Tensor] = {}    # of the last exchange(), by index, without gradients

    # --------------------------------------------------------------------------------------------------- traced ----

    def _live_variables(self):
        return [variable() for variable in self._variables]

    def _moment_variables(self):
        """The optimizer's moments, by index."""
        pairs = [adam.moments(self._optimizer(), variable) for variable in self._live_variables()]
        ms, vs = ([native_variable(pair[place]) for pair in pairs] for place in (0, 1))
        return {**dict(enumerate(ms, self._m_at)), **dict(enumerate(vs, self._v_at))}

    def _tensors_beside(self):
        """The tensors that are passed over the bridge with the gradients, by index."""
        uses, optimizer = self.uses, self._optimizer()
        tensors: dict[int, tf.Tensor] = {}
        if uses.shown:
            tensors.update(enumerate((variable.read_value() for variable in self._live_variables()), self._weights_at))
        if uses.adam:
            tensors.update((index, moment.read_value()) for index, moment in self._moment_variables().items())
            for name, value in (("learning rate", adam.learning_rate(optimizer)), ("iterations", optimizer.iterations)):
                tensors[self._numbers_at[name]] = tf.cast(tf.convert_to_tensor(value), tf.float64)
        if uses.updates:
            tensors[self._decision_at] = tf.zeros([], tf.int32)
        return tensors

    def factor_of(self, weight: Any) -> Any:
        """The factor of this rank's gradients in a weighted average, a float64 scalar."""
        return self._weighing.exchange([tf.cast(weight, tf.float64)])[0]

    def exchange(self, gradients: Any, places: Any) -> Any:
        """The reduced gradients, dense, in the given order."""
        self.places = places
        if self._compression is not Compression.none:
            gradients, contexts = zip(*map(self._compression.compress, gradients), strict=True)
        count = self._count
        tensors = self._tensors_beside() if self.uses.shown or self.uses.adam else {}
        self._count_beside = len(tensors)
        # Backward passes compute the last ones first; in eager mode they are sent in this order.
        tensors.update(zip(range(count - 1, -1, -1), reversed(gradients), strict=True))
        results = dict(zip(tensors, self._before.exchange(list(tensors.values()), list(tensors)), strict=True))
        reduced = list(map(results.pop, range(count)))
        self._results = results
        written = self._assign_weights() if self.uses.written else []
        if self.uses.variance:
            written += [variance.assign(self._results[index]) for index, variance in self._moment_variables().items()
                        if index >= self._v_at]
        if written:
            with tf.control_dependencies(_operations(written)):
                reduced = list(map(tf.identity, reduced))
        if not tf.executing_eagerly():
            for gradient, result in zip(gradients, reduced, strict=True):
                result.set_shape(gradient.shape)
        if self._compression is not Compression.none:
            reduced = list(map(self._compression.decompress, reduced, contexts))
        return reduced

    def _differentiate(self, gradients):
        """Reduces second-order gradients by the same average or sum as the first-order ones."""
        algorithm, op, group = self._options.algorithm, self._options.op, self._options.process_set
        if self._options.delay or algorithm.relaxed:
            raise NotImplementedError(NOT_LINEAR.format(
                what="delay=1" if self._options.delay else f"algorithm {type(algorithm).__name__}"))
        return allreduce(gradients, None, op, 1.0, 1.0, registered_id(group), label="HorovodSecondOrder")

    def _assign_weights(self):
        return [variable.assign(self._results[index])
                for index, variable in enumerate(self._live_variables(), self._weights_at)]

    def update(self, apply: Callable[..., Any], instead: Callable[..., Any]) -> Any:
        """See Reduction.update()."""
        applied = self._apply_or(apply, instead) if self.uses.updates else apply()
        if not self.uses.after:
            return applied
        first, variables = self._weights_at, self._live_variables()
        before = [] if applied is None or tf.executing_eagerly() else [applied]
        with tf.control_dependencies(before):
            weights = self._after.exchange([variable.read_value() for variable in variables],
                                           range(first, first + len(variables)))
            written = [variable.assign(weight) for variable, weight in zip(variables, weights, strict=True)]
        return applied if tf.executing_eagerly() else tf.group(*before, *_operations(written))

    def _apply_or(self, apply, instead):
        """Calls apply(), or instead() if the algorithm has updated the weights. Returns a tensor that follows it."""
        def by_algorithm():
            self._assign_weights()
            if self.uses.adam:
                for index, moment in self._moment_variables().items():
                    moment.assign(self._results[index])
            instead()
            return tf.constant(True)

        def by_optimizer():
            apply()
            return tf.constant(False)

        return tf.cond(tf.not_equal(self._results[self._decision_at], 0), by_algorithm, by_optimizer)

    # ------------------------------------------------------------------------------- called by bridges at run time ----

    def _put(self, index, view):
        if index in self._views:
            # The previous step was abandoned, because of an error elsewhere in the graph.
            self.reducer.reset()
        self._views[index] = view
        beside = index >= self._count
        self._passed_beside += beside
        # Algorithms may read weights when the first gradient is ready, but the graph passes tensors in any order.
        if self._passed_beside == self._count_beside:
            for ready in [each for each in self._views if each < self._count] if beside else [index]:
                self.reducer.gradient_ready(ready)

    def _put_weight(self, _, view):
        self._weight_view = view

    def _make_factor(self):
        # Not in _put_weight(): TensorFlow may call that in any order. The weight of an abandoned step may be in flight.
        memory = ffi.cast("double *", self._weight_view.dst)
        self._weight = Weight(memory[0], f"weight.{self.reducer.number}", self.reducer.group, self._weight)
        memory[0] = self._weight.factor()

    def _synchronize(self):
        try:
            self.reducer.synchronize()
            if self.reducer.step():     # only algorithms that update
                ffi.cast("int32_t *", self.gradient(self._decision_at).dst)[0] = 1
        finally:
            self.discard()
        if not self.uses.after:
            self.reducer.stepped()

    def _stepped(self):
        self.reducer.stepped()
        self.discard()

    # ------------------------------------------------------------------------------------- the Source at run time ----

    def gradient(self, index: int) -> Any:
        if index in self._views:
            return self._views[index]
        raise RuntimeError("the previous step was interrupted, so this one is aborted, too: run the step again")

    prepare = gradient

    def weight(self, index: int) -> Any:
        if self._views:
            return self.gradient(self._weights_at + index)
        # No step runs, as in an algorithm's abort().
        if not tf.executing_eagerly():
            raise RuntimeError("outside of a step, weights can be read only in eager mode")
        values = self._eager_copies[index] = np.array(self._variables[index]().numpy(), order="C")
        return array_view(values)

    def weight_written(self, index: int) -> None:
        if index in self._eager_copies:
            self._variables[index]().assign(self._eager_copies.pop(index))

    def _moments(self, index):
        return self.gradient(self._m_at + index), self.gradient(self._v_at + index)

    def _number(self, name):
        return ffi.cast("double *", self.gradient(self._numbers_at[name]).dst)[0]

    def discard(self) -> None:
        self._views.clear()
        self._passed_beside = 0


def _operations(assigned):
    return [] if tf.executing_eagerly() else [variable.op for variable in assigned]
