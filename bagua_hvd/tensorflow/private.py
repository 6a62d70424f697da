"""The private names of TensorFlow that this package uses, and the effect of losing them.

A release may take any of these away. tests/tensorflow/test_private.py names the release that did.
"""
import importlib
from typing import Any

import tensorflow as tf

# By path: the effect of its absence.
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
