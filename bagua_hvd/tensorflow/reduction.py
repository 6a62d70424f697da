"""Reduction of gradients in TensorFlow: eager, in tf.function graphs, and in steps that XLA compiled.

    gradients = reduction(gradients, variables)

inserts a bridge to a Reducer into the step. Each gradient is passed to Python when it is computed, so that its bucket
is communicated while the backward pass computes others; one op waits for all. The tracing of a graph decides which
gradients exist and which are sparse.

The part common to all backends of Keras is in bagua_hvd/_keras/reduction.py.
"""
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from bagua_hvd._keras import reduction
from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.core.identity import ByIdentity
from bagua_hvd.core.native import ffi
from bagua_hvd.job import basics
from bagua_hvd.job.basics import Adasum
from bagua_hvd.reduction.options import GradientOptions, check_groups
from bagua_hvd.reduction.weight import check_alone
from bagua_hvd.tensorflow.bridge import Bridge
from bagua_hvd.tensorflow.compression import Compression
from bagua_hvd.tensorflow.graphs import compiled_by_xla, native_variable, one_by_one
from bagua_hvd.tensorflow.mpi_ops import allreduce, grouped_allreduce, size_op
from bagua_hvd.tensorflow.step import Step, Uses

TAPE_SEES_NO_WEIGHTS = (
    "{name} communicates weights, which a tape does not see: take the gradients of a plain tf.GradientTape, and apply "
    "them with DistributedOptimizer(optimizer, algorithm=...).apply_gradients(...)"
)
STEP_NOT_SEEN = (
    "{name} has not seen the gradients that are being applied: with an optimizer of tf.compat.v1, get them from its "
    "minimize() or compute_gradients()"
)
NO_STEP_TO_REPLACE = (
    "{name} updates the weights in the optimizer's place, which an optimizer of tf.compat.v1 does not allow: use "
    "DistributedOptimizer with an optimizer of Keras"
)

LOST_IN_WINDOW = (
    "{name} has a gradient from an earlier pass of this window of backward_passes_per_step, but is not among the "
    "variables of this pass. Its gradient would be lost. Pass the same variables in every pass, with zeros for missing "
    "gradients, or make a DistributedOptimizer for each list"
)
NOT_LATE = "{what} cannot be delayed: delay=1 supports only dense gradients of variables. {remedy}"
XLA_GOES_ON = (
    "every_step=True cannot keep every step in a program compiled by XLA, which changes weights even after a "
    "rank is lost: pass jit_compile=False to compile() or tf.function; or leave out every_step and call commit()"
)
OTHER_TAPE = "Use a tape without delay."


def dense(gradient: Any, sparse_as_dense: bool) -> Any:
    """A gradient that can be accumulated. ValueError: IndexedSlices, and sparse_as_dense is False."""
    if isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense:
        raise ValueError(
            "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."
        )
    return tf.convert_to_tensor(gradient)


def take(sums: Any) -> list:
    """See bagua_hvd/_keras/reduction.py."""
    variables = list(map(native_variable, sums))
    values = [tf.identity(variable.read_value()) for variable in variables]
    with tf.control_dependencies(values):
        zeroed = [tf.identity(variable.assign(tf.zeros_like(variable))) for variable in variables]
    with tf.control_dependencies(zeroed):
        return list(map(tf.identity, values))


def _rows_summed(slices):
    """IndexedSlices with each index once, in the order of first occurrence.

    Optimizers square gradients; for a repeated index, those of Keras 3 square each of its rows.
    """
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


class Reduction(reduction.Reduction):
    """The reduction on TensorFlow."""

    native = staticmethod(native_variable)
    take = staticmethod(take)

    def __init__(self, options: GradientOptions, optimizer: Any = None, passes: int = 1) -> None:
        self.compression = options.compression or Compression.none
        self._uses = Uses(options.algorithm, optimizer)
        self._traced_in: Any = lambda: None     # the graph of the last step that was traced
        self._alone = Bridge(lambda _, view: check_alone(ffi.cast("double *", view.dst)[0]), lambda: None)
        if self._uses.updates and optimizer is None:
            raise ValueError(NO_STEP_TO_REPLACE.format(name=type(options.algorithm).__name__))
        super().__init__(options, optimizer, passes)

    def dense(self, gradient: Any) -> Any:
        return dense(gradient, self.options.sparse_as_dense)

    def _make_step(self, variables):
        return Step(self.options, list(map(native_variable, variables)), self._optimizer(), self._passes)

    def _adasum(self, gradients):
        return grouped_allreduce(gradients, op=Adasum, compression=self.compression)

    def in_turn(self, gradients: Any, first: Any, then: Any) -> None:
        if tf.executing_eagerly():
            super().in_turn(gradients, first, then)
            return
        if compiled_by_xla():
            raise ValueError(XLA_GOES_ON)
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        # Weight decay and the iteration counter do not depend on gradients.
        with tf.control_dependencies([gradient for gradient in gradients if gradient is not None]):
            first()
        with tf.control_dependencies(graph.get_operations()[before:]):
            then()

    def traces(self) -> bool:
        return not tf.executing_eagerly()

    def check_window(self, counter: Any, passes: int, others: list) -> None:
        if tf.executing_eagerly():
            return
        before, graph = self._traced_in(), tf.compat.v1.get_default_graph()
        self._traced_in = weakref.ref(graph)
        counter = native_variable(counter)
        with tf.init_scope():       # where it has counted the passes that have been run; none if this trace makes it
            within = before is graph or (
                counter is not None and counter.is_initialized() and counter.numpy() % passes != 0)
        lost = [variable for variable in others if variable.trainable]
        if within and lost:
            raise ValueError(LOST_IN_WINDOW.format(name=getattr(lost[0], "path", lost[0].name)))

    def _times(self, gradient, factor):
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._times(gradient.values, factor), gradient.indices, gradient.dense_shape)
        return tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))

    def _divided(self, gradient):
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._divided(gradient.values), gradient.indices, gradient.dense_shape)
        if basics.runtime.options.elastic:      # the size may change while a function stays
            return gradient / tf.cast(size_op(self.options.process_set.process_set_id), gradient.dtype)
        return super()._divided(gradient)

    def update_seen(self, apply: Callable[..., Any], instead: Callable[..., Any]) -> Any:
        """update() for optimizers to which users pass gradients.

        Raises:
            RuntimeError: this object has not reduced the gradients, so the algorithm has not seen the step.
        """
        if self._uses.any and self._used is None and self.options.communicates and not len(self._local):
            raise RuntimeError(STEP_NOT_SEEN.format(name=type(self.options.algorithm).__name__))
        return self.update(apply, instead)

    def __call__(self, gradients, variables, local=(), weight=None):
        gradients = list(gradients)
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                # Algorithms on weights have all of them in buckets, and so need all gradients there.
                # Gradients that are reduced alone may arrive after others have been applied.
                as_dense = (self.options.sparse_as_dense or self._uses.any or compiled_by_xla()
                            or self._observer is not None)
                gradients[index] = tf.convert_to_tensor(gradient) if as_dense else _rows_summed(gradient)
        if not tf.executing_eagerly() and self.options.communicates:
            one_by_one(gradients)
        return super().__call__(gradients, variables, local, weight)

    def _checked(self, gradients, weight):
        with tf.control_dependencies(self._alone.exchange([tf.cast(weight, tf.float64)])):      # known when it runs
            return [gradient if gradient is None else tf.identity(gradient) for gradient in gradients]

    def _has_bucket(self, gradient, variable):
        return not isinstance(gradient, tf.IndexedSlices) and isinstance(variable, (tf.Variable, keras.Variable))

    def _reduce_alone(self, gradient, name):
        sparse = isinstance(gradient, tf.IndexedSlices)
        if self.options.delay:
            raise ValueError(NOT_LATE.format(what="IndexedSlices", remedy="Pass sparse_as_dense=True.") if sparse else
                             NOT_LATE.format(what="the gradient of a tensor", remedy=OTHER_TAPE))
        reduced = self._allreduce(gradient, name)
        return _rows_summed(reduced) if sparse else reduced

    def _allreduce(self, tensor, name):
        # The average of gathered rows is their sum divided by the number of ranks; predivision changes only rounding.
        return allreduce(tensor, op=self.options.op, compression=self.compression, name=name,
                         process_set=self.options.process_set)

    def jacobians(self, jacobians: Any, variables: Any, local: Any) -> Any:
        """Reduces Jacobian matrices, each by itself, since its shape is not its variable's."""
        jacobians = list(jacobians)
        if not self.options.communicates:
            return jacobians
        if self.options.delay:
            raise ValueError(NOT_LATE.format(what="Jacobian matrices", remedy=OTHER_TAPE))
        for index, (jacobian, variable) in enumerate(zip(jacobians, variables, strict=True)):
            if jacobian is not None:
                jacobians[index] = (self._left_local(jacobian) if self._is_local(variable, local) else
                                    self._allreduce(jacobian, f"jacobian.{index}"))
        return jacobians


def _settings(value):
    """A hashable value that is equal for objects of equal class and settings, also of nested ones, as in Auto."""
    if isinstance(value, dict):
        return tuple((key, _settings(each)) for key, each in value.items())
    if isinstance(value, weakref.WeakKeyDictionary | weakref.WeakSet):
        return None
    text = repr(value)
    return text if text != object.__repr__(value) else (type(value), _settings(vars(value)))


class _SharedReductions:
    """Shares one Reduction among tapes with equal options, because tapes are made anew for every step."""

    def __init__(self):
        self._reductions = {}
        self._kinds = ByIdentity()      # by Algorithm: see _kind_of()

    def get(self, options):
        """The Reduction for options that have not been checked. It does not keep the variables in `groups` alive."""
        groups, named = options.groups, []
        check_groups(groups)
        if isinstance(groups, (list, tuple)):
            lists = [[each for each in map(native_variable, group) if isinstance(each, tf.Variable)]
                     for group in groups]
            named = [variable for group in lists for variable in group]
            options = options._replace(groups=[list(map(weakref.ref, group)) for group in lists])
            groups = tuple(tuple(map(id, group)) for group in lists)
        key = options._replace(groups=groups, algorithm=self._kind_of(options.algorithm))
        if key not in self._reductions:
            options = options.check()
            if Uses(options.algorithm, None).any:       # update() is never called
                raise ValueError(TAPE_SEES_NO_WEIGHTS.format(name=type(options.algorithm).__name__))
            made = self._reductions[key] = Reduction(options)
            for variable in named:      # graphs need the Reduction as long as any of them lives; ids are used again
                weakref.finalize(variable, self._forget, key, made).atexit = False
        return self._reductions[key]

    def _kind_of(self, algorithm):
        """A hashable value that is equal for Algorithms of equal class and settings: every step may make a new one."""
        if not isinstance(algorithm, Algorithm):
            return algorithm
        if algorithm not in self._kinds:
            self._kinds[algorithm] = _settings(algorithm)
        return self._kinds[algorithm]

    def _forget(self, key, made):
        if self._reductions.get(key) is made:
            del self._reductions[key]


shared_reductions = _SharedReductions()
