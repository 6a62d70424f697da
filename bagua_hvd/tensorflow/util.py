"""Small helpers under Horovod's names (`horovod.tensorflow.util`)."""
from typing import Any

import tensorflow as tf

from bagua_hvd.core.util import _cache  # noqa: F401  (Horovod's name for it)
from bagua_hvd.tensorflow.graphs import native_variable

_executing_eagerly = tf.executing_eagerly


def _make_subgraph(f):
    """The function as a tf.function."""
    return tf.function(f)


def vars_to_refs(variables: Any) -> Any:
    """The variables, in any nesting of lists and tuples, as hashable references in tuples."""
    if isinstance(variables, (list, tuple)):
        return tuple(vars_to_refs(variable) for variable in variables)
    variables = native_variable(variables)
    return variables.ref() if isinstance(variables, (tf.Tensor, tf.Variable)) else variables


def refs_to_vars(refs: Any) -> Any:
    """The variables of vars_to_refs()'s `refs`, in lists."""
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref() if hasattr(refs, "deref") else refs
