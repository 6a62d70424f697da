"""Helpers for ops that depend on the graph around them, and the private names of TensorFlow that this package uses."""
import functools
import importlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from bagua_hvd.collectives.arguments import wrong_option
from bagua_hvd.core.util import doc_from

# The private names, any of which a release may take away, by path: the effect of its absence.
# tests/tensorflow/test_private.py names the release that did.
NAMES = {
    "tensorflow.python.ops.control_flow_util.GraphOrParentsInXlaContext":
        "functions compiled by XLA are traced as others are, and XLA refuses the operations",
    "tensorflow.compiler.tf2xla.ops.gen_xla_ops.xla_custom_call_v2":
        "functions compiled by XLA raise NotImplementedError",
    "tensorflow.Operation._add_control_input":
        "gradients of a graph come in any order, so less of the communication is hidden",
}


def find(path: str) -> Any:
    """The object with this path, or None."""
    module, _, name = path.rpartition(".")
    owner: Any = tf.Operation if module == "tensorflow.Operation" else None
    try:
        owner = owner or importlib.import_module(module)
    except ImportError:
        return None
    return getattr(owner, name, None)


in_xla_context, xla_custom_call, add_control_input = map(find, NAMES)

# For functions that scripts call while a graph is traced: AutoGraph would rewrite them and all their callees.
as_written = tf.autograph.experimental.do_not_convert


def public(function: Callable[..., Any]) -> Any:
    """Decorator: as_written; an option of a wrong type is a TypeError that names it, one too large a ValueError."""

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
    """Decorator for a variant of a collective: public, with the docstring of `source`; see doc_from()."""
    return lambda function: public(doc_from(source, note, **arguments)(function))


def run_independently(output: Any) -> None:
    """Lets the op that yields this tensor (or Operation) run in any order with others, and never be pruned.

    Otherwise tf.function runs stateful ops in program order: a collective would wait for the one before it, which ranks
    may reach in another order. Does nothing in eager mode and in graphs of tf.compat.v1.
    """
    if not tf.executing_eagerly():
        manager = getattr(tf.compat.v1.get_default_graph(), "experimental_acd_manager", None)
        if manager is not None:
            manager.run_independently(getattr(output, "op", output))


class _Order:
    """Orders exchanges in functions: each writes one variable, and TensorFlow lets functions write it in program order.

    So a call, condition or loop with an exchange in it runs after all exchanges before it and before those after it, in
    any function. In XLA programs only data dependencies give an order, so the variable's value serves as a token.

    Methods do nothing in graphs of tf.compat.v1, in which a session may run either of two exchanges.
    """

    @staticmethod
    @functools.cache
    def _make():
        # Not a tf.Variable: a function could not create one in its second tracing.
        with tf.device("CPU:0"):
            variable = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[1], shared_name="bagua_hvd_order")
            tf.raw_ops.AssignVariableOp(resource=variable, value=tf.zeros([1], tf.int64))
        return variable

    def _variable(self):
        with tf.init_scope():
            return self._make() if tf.executing_eagerly() else None

    def read(self):
        """The token, as a list of operands: an op that takes it runs after all exchanges that were traced before."""
        variable = self._variable()
        if variable is None:
            return []
        with tf.device("CPU:0"):
            return [tf.raw_ops.ReadVariableOp(resource=variable, dtype=tf.int64)]

    def write(self, token=None):
        """Returns operations that run after all exchanges traced before and before those traced next."""
        variable = self._variable()
        if variable is None:
            return []
        with tf.device("CPU:0"):
            token = tf.zeros([1], tf.int64) if token is None else token
            return [tf.raw_ops.AssignVariableOp(resource=variable, value=token)]

    def first(self, make):
        """The result of make(), read or write, for the first exchange of this graph."""
        graph = tf.compat.v1.get_default_graph()
        if not hasattr(graph, "_bagua_hvd_first"):
            with tf.control_dependencies(None):
                graph._bagua_hvd_first = make()
        return graph._bagua_hvd_first


order = _Order()


def one_by_one(gradients: Any) -> None:
    """Makes the graph compute these tensors in the order of tracing, which is that of the backward pass.

    The next op in the graph waits for each of them. Otherwise TensorFlow computes any op that is ready: usually first
    the chain of activation gradients down to the first layer, and then all weight gradients at the end of the step,
    where no computation is left to overlap with their communication. (TicTac, Hashemi et al., MLSys 2019, orders
    transfers likewise.) Does nothing in eager mode, which has this order, and in graphs of tf.compat.v1.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or getattr(graph, "experimental_acd_manager", None) is None or add_control_input is None:
        return
    last = {each.op for each in gradients if tf.is_symbolic_tensor(each) and each.graph is graph}
    waiting = None
    for op in graph.get_operations():       # in order of creation, so that no cycle can arise
        if waiting is not None and op.inputs:
            add_control_input(op, waiting)
            waiting = None
        if op in last:
            waiting = op


def compiled_by_xla() -> Any:
    """Whether this code is being traced for tf.function(jit_compile=True)."""
    return not tf.executing_eagerly() and in_xla_context is not None and in_xla_context(
        tf.compat.v1.get_default_graph()
    )


def native_variable(variable: Any) -> Any:
    """The tf.Variable behind a Keras variable; other values unchanged."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable
