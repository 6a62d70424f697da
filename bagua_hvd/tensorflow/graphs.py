"""What the ops of this package need to know of the graph that they are put into."""
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from bagua_hvd.common.util import doc_from

# For functions that scripts call while a graph is traced: AutoGraph would rewrite them, and all that they call.
as_written = tf.autograph.experimental.do_not_convert


def form_of(source, note=None):
    """Decorator for a form of a collective: as_written, with the docstring of `source` after a `note`."""
    return lambda function: as_written(doc_from(source, note)(function))


def run_independently(output):
    """Lets the op that yields this tensor (or Operation) run in any order with others, and always.

    tf.function runs stateful ops in program order otherwise: a collective would wait for the one before it, which ranks
    may reach in another order. Does nothing in eager mode and in graphs of tf.compat.v1.
    """
    if not tf.executing_eagerly():
        manager = getattr(tf.compat.v1.get_default_graph(), "experimental_acd_manager", None)
        if manager is not None:
            manager.run_independently(getattr(output, "op", output))


def compiled_by_xla():
    """Whether this code is being traced for tf.function(jit_compile=True)."""
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )
