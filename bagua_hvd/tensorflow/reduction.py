"""Reduction of gradients in TensorFlow: eager, in tf.function graphs, and in steps that XLA compiled.

    gradients = reduction(gradients, variables)

puts into the step a bridge to a Reducer (common/reducer.py): each gradient goes to Python as soon as it exists, so that
its bucket travels while the backward pass computes others; one op waits for all. What a graph may not know is decided
when it is traced: which gradients there are, and which of them are sparse.

Reducers number themselves when they are made, and their operations carry that number. So they are made once for each
list of variables, however often functions are traced anew: ranks trace at different times (the last batch of an epoch
is smaller on some), but meet lists of variables in the same order.
"""
import weakref

import tensorflow as tf

from bagua_hvd.algorithms import Algorithm
from bagua_hvd.common import basics
from bagua_hvd.common.basics import Adasum
from bagua_hvd.common.buckets import Member
from bagua_hvd.common.gradient_options import check_groups
from bagua_hvd.common.model import Model
from bagua_hvd.common.reducer import Gradients, Reducer
from bagua_hvd.tensorflow.bridge import Bridge
from bagua_hvd.tensorflow.compression import Compression
from bagua_hvd.tensorflow.dtypes import native_dtype
from bagua_hvd.tensorflow.graphs import compiled_by_xla
from bagua_hvd.tensorflow.mpi_ops import allreduce, grouped_allreduce, size_op


def native_variable(variable):
    """The tf.Variable behind a variable of Keras, and other things as they are."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


class _Step(Gradients):
    """Gradients and weights of some variables, in the memory where bridges show them during one step.

    Weights go over the bridge only for algorithms that look at them, and back only for those that write them:

        gradients, weights  ->  backward_begins, communicate, before_step  ->  gradients, weights      exchange()
        the optimizer applies the gradients
        weights  ->  after_step  ->  weights                                                           stepped()
    """

    def __init__(self, options, variables):
        self._views = {}            # by index; weights are numbered on after the gradients
        self._waiting = []          # gradients that are ready before all weights are there
        self._weights_shown = 0
        self._count = len(variables)
        algorithm = options.algorithm
        self._shows_weights, self._writes_weights, self._looks_after = _looks(algorithm)
        members = [
            Member(variable.name, tuple(variable.shape), native_dtype(variable.dtype.base_dtype))
            for variable in variables
        ]
        self.reducer = Reducer(
            self, members, algorithm, options.process_set, 1, options.grouped(variables, Reduction.identify),
            *options.factors,
        )
        self._before = Bridge(self._put, self._synchronize)
        self._after = Bridge(self._keep, self._stepped)

    def _keep(self, index, view):
        if index in self._views:
            # The last step was given up half way, by an error elsewhere in the graph.
            self.reducer.reset()
        self._views[index] = view

    def _put(self, index, view):
        self._keep(index, view)
        # Weights are read when the first gradient is ready, and the graph may show them in any order.
        if index < self._count:
            self._waiting.append(index)
        else:
            self._weights_shown += 1
        if self._weights_shown == self._count or not self._shows_weights:
            while self._waiting:
                self.reducer.gradient_ready(self._waiting.pop(0))

    def _synchronize(self):
        self.reducer.synchronize()
        if not self._looks_after:
            self.reducer.stepped()

    def _stepped(self):
        self.reducer.stepped()
        self.discard()

    def view(self, index):
        if index not in self._views:
            raise RuntimeError("the step before this one was given up half way, and so is this one; the next one works")
        return self._views[index]

    def weight(self, index):
        return self.view(self._count + index)

    def discard(self):
        self._views.clear()
        self._waiting.clear()
        self._weights_shown = 0

    def exchange(self, gradients, variables):
        """The reduced gradients, dense, in their order."""
        # Backward passes yield the last ones first, and in eager mode this is the order in which they travel.
        indices = list(range(self._count - 1, -1, -1))
        tensors = [gradients[index] for index in indices]
        if self._shows_weights:
            indices = [*range(self._count, 2 * self._count), *indices]
            tensors = [*map(tf.convert_to_tensor, variables), *tensors]
        results = dict(zip(indices, self._before.exchange(tensors, indices), strict=True))
        if self._writes_weights:
            for index, variable in enumerate(variables):
                variable.assign(results[self._count + index])
        return [results[index] for index in range(self._count)]

    def stepped(self, variables):
        """The optimizer has written the variables."""
        if self._looks_after:
            weights = self._after.exchange(
                list(map(tf.convert_to_tensor, variables)), list(range(self._count, 2 * self._count))
            )
            for variable, weight in zip(variables, weights, strict=True):
                variable.assign(weight)


def _looks(algorithm):
    """Whether it (reads weights before the step, writes them before it, has anything to do with them after it)."""
    def overrides(*hooks):
        return any(getattr(type(algorithm), hook) is not getattr(Algorithm, hook) for hook in hooks)

    writes = overrides("before_step", "step")
    return writes or overrides("backward_begins"), writes, overrides("after_step")


class Reduction:
    """Reduces lists of gradients; see also _keras/backend.py.

    Args:
        options: GradientOptions, checked.
        weights: whether stepped() will be called after every step, as algorithms need it that look at weights.
    Raises:
        ValueError: the algorithm cannot be served.
    """

    def __init__(self, options, weights=False):
        self.options = options
        algorithm = options.algorithm
        if algorithm is not None:
            if not weights and any(_looks(algorithm)):
                raise ValueError(
                    f"{type(algorithm).__name__} communicates weights, which a tape or an optimizer of tf.compat.v1 or "
                    "tf_keras does not show it: use DistributedOptimizer with an optimizer of Keras 3"
                )
            algorithm.prepare(Model("unused", Gradients(), options.process_set))
        self._used = None       # (_Step, variables) of the step under way
        self.compression = options.compression or Compression.none
        self._local = set()         # keys of variables that are not reduced
        self._steps = {}        # keys of variables -> _Step

    @staticmethod
    def identify(variable):
        return id(native_variable(variable))

    @staticmethod
    def dense(gradient):
        if isinstance(gradient, tf.IndexedSlices):
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."
            )
        return gradient

    def register_local(self, variable):
        self._local.add(self.identify(variable))

    def reset(self):
        for step in self._steps.values():
            step.reducer.reset()

    def stepped(self):
        """The optimizer has applied the gradients: the last of them that were reduced."""
        if self._used is not None:
            step, variables = self._used
            self._used = None
            step.stepped(variables)

    def __call__(self, gradients, variables, local=frozenset()):
        """Reduced gradients, in their order; None where there was None.

        Args:
            gradients: tensors, IndexedSlices or None. variables: what they are gradients of, variables or tensors.
            local: keys of further variables that are not reduced.
        """
        reduced = list(gradients)
        self._used = None
        if not self.options.communicates:
            return reduced
        travelling = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            key = self.identify(variable)
            if key not in self._local and key not in local:
                travelling.append(index)
            elif self.options.scale_local_gradients:
                reduced[index] = gradient / self._size(gradient.dtype)
        by_step = []
        for index in travelling:
            gradient = self._prepared(gradients[index])
            if isinstance(gradient, tf.IndexedSlices) or not isinstance(native_variable(variables[index]), tf.Variable):
                reduced[index] = self._reduce_alone(gradient, f"gradient.{index}")
            else:
                by_step.append((index, gradient))
        results = self._reduce([gradient for _, gradient in by_step], [variables[index] for index, _ in by_step])
        for (index, _), result in zip(by_step, results, strict=True):
            reduced[index] = result
        return reduced

    def _size(self, dtype):
        if basics.runtime.options.elastic:      # it may change while a function stays
            return tf.cast(size_op(self.options.process_set.process_set_id), dtype)
        return self.options.process_set.size()

    def _prepared(self, gradient):
        if isinstance(gradient, tf.IndexedSlices) and (self.options.sparse_as_dense or compiled_by_xla()):
            return tf.convert_to_tensor(gradient)
        return gradient

    def _reduce_alone(self, gradient, name):
        # Average of rows that are gathered is their sum divided by the ranks; predivision changes rounding only.
        return allreduce(gradient, op=self.options.op, compression=self.compression, name=name,
                         process_set=self.options.process_set)

    def _reduce(self, gradients, variables):
        if not gradients:
            return []
        if self.options.op == Adasum:
            return grouped_allreduce(gradients, op=Adasum, compression=self.compression)
        compressed, contexts = zip(*map(self.compression.compress, gradients), strict=True)
        variables = list(map(native_variable, variables))
        step = self._step(variables)
        exchanged = step.exchange(compressed, variables)
        self._used = step, variables
        results = []
        for gradient, result, context in zip(gradients, exchanged, contexts, strict=True):
            result = self.compression.decompress(result, context)
            result.set_shape(gradient.shape)
            results.append(result)
        return results

    def _step(self, variables):
        key = tuple(map(id, variables))
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _Step(self.options, variables)
            for variable in variables:
                weakref.finalize(variable, self._steps.pop, key, None).atexit = False
        return step


_shared = {}


def shared_reduction(options):
    """The one Reduction of equal options, which are not checked yet: for tapes, which are made anew for every step."""
    groups = options.groups
    check_groups(groups)
    if isinstance(groups, (list, tuple)):
        groups = tuple(tuple(map(Reduction.identify, group)) for group in groups)
    key = options._replace(groups=groups)
    if key not in _shared:
        _shared[key] = Reduction(options.check())
    return _shared[key]
