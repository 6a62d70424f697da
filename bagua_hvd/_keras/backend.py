"""The differences between the backends of Keras. Everything else in this folder is common to all.

A backend is a module with

    Reduction, Compression          see reduction.py; classes none and fp16
    translated_errors()             a context in which a failed collective raises HorovodInternalError
    broadcast_global_variables()    of the root, for graphs of TensorFlow 1
    wrap(), load_model()            as in optimizer.py, for tf_keras

of which the last three are TensorFlow's only: tensorflow/tf_keras.py, which registers itself, since TensorFlow's front
end is built on this folder. That of torch is torch_reduction.py.
"""
from collections.abc import Callable
from typing import Any

import keras

_of_tensorflow: Any = None


def register(backend: Any) -> None:
    """Registers TensorFlow's backend."""
    global _of_tensorflow
    _of_tensorflow = backend


def current() -> Any:
    """The backend that Keras runs on. If it has none here: TensorFlow's, though without reductions."""
    if keras.backend.backend() != "torch":
        return of_tf_keras()
    from bagua_hvd._keras import torch_reduction

    return torch_reduction


def of_tf_keras() -> Any:
    """The backend of tf_keras, TensorFlow's. RuntimeError: its front end has not been imported."""
    if _of_tensorflow is None:
        raise RuntimeError("models and optimizers of tf_keras need TensorFlow's front end: import bagua_hvd.tensorflow")
    return _of_tensorflow


def make_reduction(options: Any, optimizer: Any, passes: int) -> Any:
    """The Reduction with these arguments on this backend. NotImplementedError: it is neither tensorflow nor torch."""
    if keras.backend.backend() not in ("tensorflow", "torch"):
        raise NotImplementedError(
            f"KERAS_BACKEND={keras.backend.backend()}: distributed optimizers work on the backends tensorflow and torch"
        )
    return current().Reduction(options, optimizer, passes)


def as_written(function: Callable[..., Any]) -> Any:
    """Decorator: excludes the function from TensorFlow's AutoGraph, which would rewrite it and all its callees."""
    if keras.backend.backend() != "tensorflow":
        return function
    import tensorflow as tf

    return tf.autograph.experimental.do_not_convert(function)


def broadcast_global_variables(root_rank: int) -> Any:
    """For graphs of tf.compat.v1: the operation that gives every rank the root's values of all variables.

    Args:
        root_rank: global rank.
    Raises:
        RuntimeError: in eager mode, and on other backends; use BroadcastGlobalVariablesCallback there.
    """
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            "broadcast_global_variables() is for graphs: use hvd.callbacks.BroadcastGlobalVariablesCallback"
        )
    return current().broadcast_global_variables(root_rank)
