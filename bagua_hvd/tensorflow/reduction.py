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

from bagua_hvd.common.basics import Adasum
from bagua_hvd.common.buckets import Member
from bagua_hvd.common.reducer import Gradients, Reducer
from bagua_hvd.tensorflow.bridge import Bridge
from bagua_hvd.tensorflow.compression import Compression
from bagua_hvd.tensorflow.dtypes import native_dtype
from bagua_hvd.tensorflow.graphs import compiled_by_xla
from bagua_hvd.tensorflow.mpi_ops import allreduce, grouped_allreduce


def native_variable(variable):
    """The tf.Variable behind a variable of Keras, and other things as they are."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


class _Step(Gradients):
    """The gradients of some variables, in the memory where the bridge shows them during one step."""

    def __init__(self, options, variables):
        variables = [native_variable(variable) for variable in variables]
        self._views = {}
        members = [
            Member(variable.name, tuple(variable.shape), native_dtype(variable.dtype.base_dtype))
            for variable in variables
        ]
        self.reducer = Reducer(
            self, members, options.chosen_algorithm(), options.process_set, 1,
            options.grouped(variables, Reduction.identify), *options.factors,
        )
        self.bridge = Bridge(self._put, self.reducer.synchronize)

    def _put(self, index, view):
        if index in self._views:
            # The last step was given up half way, by an error elsewhere in the graph.
            self.reducer.reset()
        self._views[index] = view
        self.reducer.gradient_ready(index)

    def view(self, index):
        return self._views[index]

    def discard(self):
        self._views.clear()

    def exchange(self, gradients):
        """The reduced gradients of all variables, dense, in their order."""
        # Backward passes yield the last ones first, and in eager mode this is the order in which they travel.
        indices = range(len(gradients) - 1, -1, -1)
        return self.bridge.exchange([gradients[index] for index in indices], indices)[::-1]


class Reduction:
    """Reduces lists of gradients; see also _keras/backend.py.

    Args:
        options: GradientOptions.
    """

    def __init__(self, options):
        self.options = options
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

    def stepped(self, variables):
        """The graph has nothing to say after the step: these algorithms are done with it."""

    def __call__(self, gradients, variables, local=frozenset()):
        """Reduced gradients, in their order; None where there was None.

        Args:
            gradients: tensors, IndexedSlices or None. variables: what they are gradients of, variables or tensors.
            local: keys of further variables that are not reduced.
        """
        reduced = list(gradients)
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
                reduced[index] = gradient / self.options.process_set.size()
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
        exchanged = self._step(variables).exchange(compressed)
        results = []
        for gradient, result, context in zip(gradients, exchanged, contexts, strict=True):
            result = self.compression.decompress(result, context)
            result.set_shape(gradient.shape)
            results.append(result)
        return results

    def _step(self, variables):
        variables = [native_variable(variable) for variable in variables]
        key = tuple(map(id, variables))
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _Step(self.options, variables)
            for variable in variables:
                weakref.finalize(variable, self._steps.pop, key, None).atexit = False
        return step


_shared = {}


def shared_reduction(options):
    """The one Reduction of equal options: for tapes, which are made anew for every step."""
    groups = options.groups
    if isinstance(groups, (list, tuple)):
        groups = tuple(tuple(map(Reduction.identify, group)) for group in groups)
    key = options._replace(groups=groups)
    if key not in _shared:
        _shared[key] = Reduction(options)
    return _shared[key]
