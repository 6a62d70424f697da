"""Accumulates gradients over several backward passes, under Horovod's names; for graphs, tf.function and eager code.

    helper.compute_gradients(gradients, variables)      adds; at every n-th pass: the reduced sums
    helper.apply_gradients(closure, optimizer)          at every n-th pass: closure()
"""
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from bagua_hvd._keras import values
from bagua_hvd.core.identity import ByIdentity
from bagua_hvd.job.process_sets import ProcessSet, global_process_set
from bagua_hvd.reduction.options import check_passes
from bagua_hvd.tensorflow.graphs import as_written, native_variable
from bagua_hvd.tensorflow.reduction import dense, take


def _finite(gradient):
    if not (gradient.dtype.is_floating or gradient.dtype.is_complex):
        return tf.identity(gradient)
    return tf.where(tf.math.is_finite(tf.abs(gradient)), gradient, tf.zeros_like(gradient))


class LocalGradientAggregationHelper:
    """See the module. The sums are variables of the graph; initialize them with the others.

    Args:
        backward_passes_per_step: n, above 1. allreduce_func: function of (gradients, variables) that reduces.
        sparse_as_dense: IndexedSlices are added as dense tensors; else they are refused.
        average_aggregated_gradients: divide the sums by n.
        rank, optimizer_type, process_set, name: unused, for compatibility with Horovod.
        scale_local_gradients: divide gradients of variables given to register_local_var() by the number of ranks.
    Raises:
        ValueError: backward_passes_per_step is 0 or less; IndexedSlices, and sparse_as_dense is False.
    """

    def __init__(self, backward_passes_per_step: int, allreduce_func: Callable[..., Any], sparse_as_dense: bool,
                 average_aggregated_gradients: bool, rank: int | None = None, optimizer_type: Any = None,
                 process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True,
                 name: str | None = "") -> None:
        check_passes(backward_passes_per_step)
        self.backward_passes_per_step = backward_passes_per_step
        self.average_aggregated_gradients = average_aggregated_gradients
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self._reduce = allreduce_func
        self._local = ByIdentity(native_variable)
        self._counter: Any = None
        self._sums = ByIdentity(native_variable)
        # Variables with a gradient in this window, and weak references to them. Python does not see when graphs run,
        # so entries that tracing made are never removed.
        self._window = ByIdentity(native_variable)
        self._last_pass = None      # bool tensor: whether this pass completes a window

    def register_local_var(self, var: Any) -> None:
        """Excludes a variable from the reduction."""
        self._local.add(var)

    def others_in_window(self, variables: Any) -> list:
        """Further variables with a gradient in this window."""
        known = ByIdentity(native_variable)
        for variable in variables:
            known.add(variable)
        alive = [variable for reference in self._window.values() if (variable := reference()) is not None]
        return [variable for variable in alive if variable not in known]

    def reset(self) -> None:
        """Drops accumulated gradients."""
        self._window = ByIdentity(native_variable)
        variables = [variable for variable in (self._counter, *self._sums.values()) if variable is not None]
        values.assign(variables, [np.zeros(variable.shape, variable.dtype.as_numpy_dtype) for variable in variables])

    def _make_sums(self, variables):
        # Outside of the function being traced, which may create variables only once.
        with tf.init_scope():
            if self._counter is None:
                self._counter = tf.compat.v1.Variable(0, trainable=False, use_resource=True, name="backward_passes")
            for variable in variables:
                if variable not in self._sums:
                    self._sums[variable] = tf.compat.v1.Variable(
                        tf.zeros(variable.shape, variable.dtype.base_dtype), trainable=False, use_resource=True,
                        name="gradient_sum",
                    )

    @as_written
    def compute_gradients(self, grads: Any, vars: Any) -> Any:
        """The reduced sums at the last pass of a window; else the given gradients, which must not be applied.

        Their non-finite values become zeros: a LossScaleOptimizer that checks them would change this rank's scale
        alone. It finds overflows in the window's sum, which is equal on all ranks.
        """
        present = [index for index, gradient in enumerate(grads) if gradient is not None]
        gradients = {index: dense(grads[index], self.sparse_as_dense) for index in present}
        for index in present:
            self._window[vars[index]] = weakref.ref(vars[index])
        summed = [index for index, variable in enumerate(vars) if variable in self._window]
        variables = [vars[index] for index in summed]
        self._make_sums(vars)       # all, because a function traced later cannot create variables
        sums = {index: self._sums[vars[index]] for index in summed}
        added = [sums[index].assign_add(gradient) for index, gradient in gradients.items()]
        with tf.control_dependencies([tf.identity(total) for total in added]):
            count = tf.identity(self._counter.assign_add(1))
        self._last_pass = tf.equal(count % self.backward_passes_per_step, 0)

        def reduce():
            with tf.control_dependencies([count]):
                totals = take(sums.values())
            if tf.executing_eagerly():
                self._window = ByIdentity(native_variable)
            if self.average_aggregated_gradients:
                totals = [total / self.backward_passes_per_step for total in totals]
            return self._reduced(totals, variables)

        def other_pass():
            return [_finite(gradients[index]) if index in gradients else tf.zeros_like(total)
                    for index, total in sums.items()]

        results = tf.cond(self._last_pass, reduce, other_pass)
        everything = list(grads)
        for index, result in zip(summed, results, strict=True):
            everything[index] = result
        return everything

    def _reduced(self, totals, variables):
        indices = [i for i, variable in enumerate(variables) if variable not in self._local]
        reduced = self._reduce([totals[i] for i in indices], [variables[i] for i in indices])
        results = [total / self.process_set.size() if self.scale_local_gradients else total for total in totals]
        for index, gradient in zip(indices, reduced, strict=True):
            results[index] = gradient
        return results

    def _completes(self):
        """Whether this pass completes a window, even if compute_gradients() ran elsewhere, such as in eager mode."""
        if tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function:
            return tf.equal(self._counter % self.backward_passes_per_step, 0)
        return self._last_pass      # of this graph, after its assign_add, which nothing else orders here

    @as_written
    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the closure at the last pass of a window; else advances `iterations` or global_step, if there is one.

        Args:
            args, kwargs: those of the optimizer's apply_gradients().
        """
        def apply():
            operation = apply_grads_closure()
            with tf.control_dependencies([] if operation is None else [operation]):
                return tf.constant(True)

        def skip():
            steps = args[1] if len(args) > 1 else kwargs.get("global_step")
            if steps is None:
                steps = getattr(optimizer, "iterations", None)
            with tf.control_dependencies([] if steps is None else [tf.identity(steps.assign_add(1))]):
                return tf.constant(False)

        return tf.cond(self._completes(), apply, skip)


class LocalGradientAggregationHelperEager(LocalGradientAggregationHelper):
    __doc__ = LocalGradientAggregationHelper.__doc__

    def __init__(self, backward_passes_per_step: int, allreduce_func: Callable[..., Any], sparse_as_dense: bool,
                 average_aggregated_gradients: bool, process_set: ProcessSet = global_process_set,
                 scale_local_gradients: bool = True) -> None:
        super().__init__(backward_passes_per_step, allreduce_func, sparse_as_dense, average_aggregated_gradients,
                         process_set=process_set, scale_local_gradients=scale_local_gradients)
