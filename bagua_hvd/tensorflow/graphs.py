"""What the ops of this package need to know of the graph that they are put into."""
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from bagua_hvd.collectives.arguments import wrong_option
from bagua_hvd.core.util import doc_from
from bagua_hvd.tensorflow import private

# For functions that scripts call while a graph is traced: AutoGraph would rewrite them, and all that they call.
as_written = tf.autograph.experimental.do_not_convert


def public(function: Callable[..., Any]) -> Any:
    """Decorator: as_written; an option of a wrong type is a TypeError that names it, too large a one a ValueError."""

    @as_written
    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except AttributeError as error:
            reason = wrong_option(function, args, kwargs)
            if reason is None:
                raise
            raise reason from error
        except OverflowError as error:
            raise ValueError(f"{function.__name__}(): {error}") from None

    return call


def form_of(source: Any, note: Any = None, **arguments: Any) -> Any:
    """Decorator for a form of a collective: public, with the docstring of `source`; see doc_from()."""
    return lambda function: public(doc_from(source, note, **arguments)(function))


def run_independently(output: Any) -> None:
    """Lets the op that yields this tensor (or Operation) run in any order with others, and always.

    tf.function runs stateful ops in program order otherwise: a collective would wait for the one before it, which ranks
    may reach in another order. Does nothing in eager mode and in graphs of tf.compat.v1.
    """
    if not tf.executing_eagerly():
        manager = getattr(tf.compat.v1.get_default_graph(), "experimental_acd_manager", None)
        if manager is not None:
            manager.run_independently(getattr(output, "op", output))


class _Order:
    """The order of exchanges in functions: each writes one variable, which TensorFlow lets functions do in turn.

    So a call, condition or loop with an exchange in it comes after all exchanges before it, and before those after it,
    in whatever function they are. In programs of XLA, where only data says what comes first, its value is the token.

    Methods do nothing in graphs of tf.compat.v1, a session of which may run either of two exchanges.
    """

    @staticmethod
    @functools.cache
    def _make():
        # Not a tf.Variable: a function that is being traced for the second time could not make one.
        with tf.device("CPU:0"):
            variable = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[1], shared_name="bagua_hvd_order")
            tf.raw_ops.AssignVariableOp(resource=variable, value=tf.zeros([1], tf.int64))
        return variable

    def _variable(self):
        with tf.init_scope():
            return self._make() if tf.executing_eagerly() else None

    def read(self):
        """The token, as a list of operands: what comes after all exchanges that were traced before."""
        variable = self._variable()
        if variable is None:
            return []
        with tf.device("CPU:0"):
            return [tf.raw_ops.ReadVariableOp(resource=variable, dtype=tf.int64)]

    def write(self, token=None):
        """What comes after all exchanges that were traced before, and before those that are traced next: operations."""
        variable = self._variable()
        if variable is None:
            return []
        with tf.device("CPU:0"):
            token = tf.zeros([1], tf.int64) if token is None else token
            return [tf.raw_ops.AssignVariableOp(resource=variable, value=token)]

    def first(self, make):
        """What make(), read or write, yielded for the first exchange of this graph."""
        graph = tf.compat.v1.get_default_graph()
        if not hasattr(graph, "_bagua_hvd_first"):
            with tf.control_dependencies(None):
                graph._bagua_hvd_first = make()
        return graph._bagua_hvd_first


order = _Order()


def one_by_one(gradients: Any) -> None:
    """Lets the graph compute these tensors in the order in which they were traced, that of the backward pass.

    What comes next in the graph waits for each of them. TensorFlow computes in any order what is ready: by preference
    the chain of activations' gradients down to the first layer, and then those of the weights, all of them at the end
    of the step where nothing is left to hide their way behind. (TicTac, Hashemi et al., MLSys 2019, orders transfers
    likewise.) Does nothing in eager mode, which has this order, and in graphs of tf.compat.v1.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or getattr(graph, "experimental_acd_manager", None) is None or (
            private.add_control_input is None):
        return
    last = {each.op for each in gradients if tf.is_symbolic_tensor(each) and each.graph is graph}
    waiting = None
    for op in graph.get_operations():       # in the order in which they were made, so that no cycle can arise
        if waiting is not None and op.inputs:
            private.add_control_input(op, waiting)
            waiting = None
        if op in last:
            waiting = op


def compiled_by_xla() -> Any:
    """Whether this code is being traced for tf.function(jit_compile=True)."""
    return not tf.executing_eagerly() and private.in_xla_context is not None and private.in_xla_context(
        tf.compat.v1.get_default_graph()
    )
