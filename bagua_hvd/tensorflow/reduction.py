"""Reduction of gradients in TensorFlow: eager, in tf.function graphs, and in steps that XLA compiled.

    gradients = reduction(gradients, variables)

puts into the step a bridge to a Reducer: each gradient goes to Python as soon as it exists, so that
its bucket travels while the backward pass computes others; one op waits for all. What a graph may not know is decided
when it is traced: which gradients there are, and which of them are sparse.

Reducers number themselves when they are made, and their operations carry that number. So they are made once for each
list of variables, however often functions are traced anew: ranks trace at different times (the last batch of an epoch
is smaller on some), but meet lists of variables in the same order.
"""
import weakref

import tensorflow as tf

from bagua_hvd._keras.adam import Unbuilt
from bagua_hvd._keras.numbering import Numbered
from bagua_hvd.core.identity import ByIdentity
from bagua_hvd.job import basics
from bagua_hvd.job.basics import Adasum
from bagua_hvd.reduction.options import check_groups
from bagua_hvd.tensorflow.compression import Compression
from bagua_hvd.tensorflow.graphs import compiled_by_xla, one_by_one
from bagua_hvd.tensorflow.mpi_ops import allreduce, grouped_allreduce, size_op
from bagua_hvd.tensorflow.running_step import Looks, RunningStep
from bagua_hvd.tensorflow.step import TracedStep
from bagua_hvd.tensorflow.variables import native_variable
from bagua_hvd.training.model import Model

TAPE_SEES_NO_WEIGHTS = (
    "{name} communicates weights, which a tape does not see: take the gradients of a plain tf.GradientTape, and apply "
    "them by DistributedOptimizer(optimizer, algorithm=...).apply_gradients(...)"
)
STEP_NOT_SEEN = (
    "{name} has not seen the gradients that are being applied: with an optimizer of tf.compat.v1, get them by its "
    "minimize() or compute_gradients()"
)
NO_STEP_TO_REPLACE = (
    "{name} updates the weights in the optimizer's place, which an optimizer of tf.compat.v1 does not allow: use "
    "DistributedOptimizer with an optimizer of Keras"
)

NOT_LATE = (
    "{what} cannot be a step late: with delay=1 gradients are dense ones of variables. {remedy}"
)
OTHER_TAPE = "Ask a tape without delay for it."


def dense(gradient, sparse_as_dense):
    """A gradient that can be added up. ValueError: IndexedSlices, and sparse_as_dense is False."""
    if isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense:
        raise ValueError(
            "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."
        )
    return tf.convert_to_tensor(gradient)


def _rows_summed(slices):
    """IndexedSlices that have each index once, in the order in which they came.

    Optimizers square gradients: where an index comes twice, those of Keras 3 square each of its rows.
    """
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _divided(gradient, divisor):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
    return gradient / divisor


class Reduction(Numbered):
    """Reduces lists of gradients; see also _keras/backend.py.

    Args:
        options: GradientOptions, checked.
        weights: whether stepped() will be called after every step, as algorithms need it that look at weights.
        optimizer: of Keras, whose steps are made by update(); held weakly. passes: its backward passes for each step.
    Raises:
        ValueError: the algorithm cannot be served.
    """

    def __init__(self, options, weights=False, optimizer=None, passes=1):
        super().__init__()
        self.options = options
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self._passes = passes
        algorithm = options.algorithm
        self._looks = Looks(algorithm, optimizer)
        if algorithm is not None:
            if not weights and self._looks.any:
                raise ValueError(TAPE_SEES_NO_WEIGHTS.format(name=type(algorithm).__name__))
            if self._looks.updates and optimizer is None:
                raise ValueError(NO_STEP_TO_REPLACE.format(name=type(algorithm).__name__))
            algorithm.prepare(Model("unused", Unbuilt(optimizer), options.process_set, algorithm))
        self._used = None       # the TracedStep under way, where an algorithm looks at weights
        self.compression = options.compression or Compression.none
        self._local = ByIdentity(native_variable)       # variables that are not reduced
        self._steps = {}        # ids of variables -> RunningStep, as long as all of them live

    native = staticmethod(native_variable)

    def dense(self, gradient):
        return dense(gradient, self.options.sparse_as_dense)

    def register_local(self, variable):
        self._local.add(variable)

    def reset(self):
        for step in self._steps.values():
            step.reducer.reset()

    def update(self, apply, instead):
        """Calls apply(), which applies the gradients that were reduced last; or, where the algorithm has updated the
        weights, instead(). Returns what comes after either; see TracedStep.update()."""
        if self._used is None:
            return apply()
        return self._used.update(apply, instead)

    def stepped(self):
        """The optimizer has applied the gradients. Returns operations that have to run for the algorithm, in graphs.

        Raises:
            RuntimeError: they were not given to this object before, so that the algorithm has not seen the step.
        """
        if self._used is None:
            if self._looks.any and self.options.communicates and not self._local:
                raise RuntimeError(STEP_NOT_SEEN.format(name=type(self.options.algorithm).__name__))
            return []
        step, self._used = self._used, None
        return step.stepped()

    def __call__(self, gradients, variables, local=()):
        """Reduced gradients, in their order; None where there was None.

        Args:
            gradients: tensors, IndexedSlices or None. variables: what they are gradients of, variables or tensors.
            local: further variables that are not reduced, a ByIdentity.
        """
        self._used = None
        gradients = list(map(self._prepared, gradients))
        if not self.options.communicates:
            return gradients
        reduced, places = self._local_ones(gradients, variables, local)
        travelling = [index for index in places if gradients[index] is not None]
        present = sum(gradient is not None for gradient in gradients)
        if self._looks.updates and len(travelling) < present:
            raise ValueError(
                f"{type(self.options.algorithm).__name__} updates all weights itself: it does not go with variables "
                "that are not reduced"
            )
        one_by_one([gradients[index] for index in travelling])
        by_step = []
        for index in travelling:
            gradient = gradients[index]
            if self.options.delay and isinstance(gradient, tf.IndexedSlices):
                raise ValueError(NOT_LATE.format(what="IndexedSlices", remedy="Pass sparse_as_dense=True."))
            of_variable = isinstance(native_variable(variables[index]), tf.Variable)
            if self.options.delay and not of_variable:
                raise ValueError(NOT_LATE.format(what="the gradient of a tensor", remedy=OTHER_TAPE))
            if isinstance(gradient, tf.IndexedSlices):
                reduced[index] = _rows_summed(self._reduce_alone(gradient, f"gradient.{index}"))
            elif not of_variable:
                reduced[index] = self._reduce_alone(gradient, f"gradient.{index}")
            else:
                by_step.append((index, gradient))
        results = self._reduce([gradient for _, gradient in by_step], [variables[index] for index, _ in by_step],
                               [places[index] for index, _ in by_step])
        for (index, _), result in zip(by_step, results, strict=True):
            reduced[index] = result
        return reduced

    def jacobians(self, jacobians, variables, local):
        """The same for Jacobian matrices. Each travels by itself and as it is, for its shape is not its variable's."""
        if not self.options.communicates:
            return list(jacobians)
        if self.options.delay:
            raise ValueError(NOT_LATE.format(what="Jacobian matrices", remedy=OTHER_TAPE))
        reduced, places = self._local_ones(jacobians, variables, local)
        for index in places:
            if jacobians[index] is not None:
                reduced[index] = self._reduce_alone(jacobians[index], f"jacobian.{index}")
        return reduced

    def _local_ones(self, gradients, variables, local):
        """The gradients, with those of variables that are not reduced as they are to be; and the others by index: their
        places among all variables that are reduced, with and without a gradient."""
        reduced = list(gradients)
        places: dict[int, int] = {}
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if variable not in self._local and variable not in local:
                places[index] = len(places)
            elif gradient is not None and self.options.scale_local_gradients:
                reduced[index] = _divided(gradient, self._size(gradient.dtype))
        return reduced, places

    def _size(self, dtype):
        if basics.runtime.options.elastic:      # it may change while a function stays
            return tf.cast(size_op(self.options.process_set.process_set_id), dtype)
        return self.options.process_set.size()

    def _prepared(self, gradient):
        """IndexedSlices as dense tensors where they travel as such, else with each index once; others as they are."""
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        # Algorithms on weights have all of them in buckets, and then the gradients too.
        if self.options.sparse_as_dense or self._looks.any or compiled_by_xla():
            return tf.convert_to_tensor(gradient)
        return _rows_summed(gradient)

    def _reduce_alone(self, gradient, name):
        # Average of rows that are gathered is their sum divided by the ranks; predivision changes rounding only.
        return allreduce(gradient, op=self.options.op, compression=self.compression, name=name,
                         process_set=self.options.process_set)

    def _reduce(self, gradients, variables, places):
        if not gradients:
            return []
        if self.options.op == Adasum:
            return grouped_allreduce(gradients, op=Adasum, compression=self.compression)
        compressed, contexts = zip(*map(self.compression.compress, gradients), strict=True)
        variables = list(map(native_variable, variables))
        running = self._running_step(variables)
        running.source.places = places
        step = TracedStep(running, variables)
        exchanged = step.exchange(compressed)
        if self._looks.any:
            self._used = step
        results = []
        for gradient, result, context in zip(gradients, exchanged, contexts, strict=True):
            result = self.compression.decompress(result, context)
            result.set_shape(gradient.shape)
            results.append(result)
        return results

    def _running_step(self, variables):
        key = tuple(map(id, variables))
        step = self._steps.get(key)
        if step is None:
            def make_reducer(number):
                self._steps[key] = RunningStep(self.options, variables, self._optimizer(), self._passes, number)
                return self._steps[key].reducer

            self.make(make_reducer)
            step = self._steps[key]
            for variable in variables:
                weakref.finalize(variable, self._steps.pop, key, None).atexit = False
        return step


class _Weakly:
    """A variable in the key of a dict that does not keep it alive; one that is gone equals none."""

    def __init__(self, variable):
        self.reference = weakref.ref(variable)
        self._hash = id(variable)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        mine = self.reference()
        return isinstance(other, _Weakly) and mine is not None and mine is other.reference()


class _SharedReductions:
    """Those of tapes, which are made anew for every step: one Reduction for equal options."""

    def __init__(self):
        self._reductions = {}
        self._promised = []         # numbers, see Numbered, of those that are made next

    def get(self, options):
        """The Reduction of options that are not checked yet. It does not keep the variables in `groups` alive."""
        groups, named = options.groups, []
        check_groups(groups)
        if isinstance(groups, (list, tuple)):
            lists = [list(map(native_variable, group)) for group in groups]
            groups = tuple(
                tuple(_Weakly(variable) for variable in group if isinstance(variable, tf.Variable)) for group in lists
            )
            named = [each for group in groups for each in group]
            options = options._replace(groups=[[each.reference for each in group] for group in groups])
        key = options._replace(groups=groups)
        if key not in self._reductions:
            reduction = self._reductions[key] = Reduction(options.check())
            if self._promised:
                reduction.renumber(self._promised.pop(0))
            for each in named:
                weakref.finalize(each.reference(), self._forget, key, named).atexit = False
        return self._reductions[key]

    def _forget(self, key, named):
        # Graphs of the others need it as long as one lives.
        if all(each.reference() is None for each in named):
            self._reductions.pop(key, None)

    @property
    def number(self):
        return [reduction.number for reduction in self._reductions.values()] + self._promised

    def renumber(self, numbers):
        for reduction, mine in zip(self._reductions.values(), numbers, strict=False):
            reduction.renumber(mine)
        self._promised = numbers[len(self._reductions):]


shared_reductions = _SharedReductions()
