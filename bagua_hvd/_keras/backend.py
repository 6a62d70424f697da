"""The differences between the backends of Keras. Everything else in this folder is common to all.

TensorFlow's front end is built on this folder, and registers its parts for Keras; torch's are below. For reductions see
reduction.py.
"""
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import keras

from bagua_hvd.reduction.options import GradientOptions


@dataclass(frozen=True)
class Backend:
    """The parts that a backend supplies for Keras.

    Attributes:
        make_reduction: see make_reduction().
        Compression: classes none and fp16.
        translated_errors: makes a context in which a failed collective raises HorovodInternalError.
        broadcast_global_variables: function of the root, for graphs of TensorFlow 1.
        wrap_legacy, load_legacy_model: wrap() and load_model() of optimizer.py for tf_keras.
    The last three are TensorFlow's only.
    """

    make_reduction: Callable[..., Any]
    Compression: Any
    translated_errors: Callable[[], AbstractContextManager] = nullcontext
    broadcast_global_variables: Any = None
    wrap_legacy: Any = None
    load_legacy_model: Any = None


_of_tensorflow: Backend | None = None


def register(backend: Backend) -> None:
    """Registers TensorFlow's Backend."""
    global _of_tensorflow
    _of_tensorflow = backend


def current() -> Backend:
    """The Backend that Keras runs on. If it has none here: TensorFlow's, though without reductions."""
    if keras.backend.backend() != "torch":
        return of_tf_keras()
    from bagua_hvd._keras.torch_reduction import Reduction
    from bagua_hvd.torch.compression import Compression

    return Backend(Reduction, Compression)


def of_tf_keras() -> Backend:
    """The Backend of tf_keras, TensorFlow's. RuntimeError: its front end has not been imported."""
    if _of_tensorflow is None:
        raise RuntimeError("models and optimizers of tf_keras need TensorFlow's front end: import bagua_hvd.tensorflow")
    return _of_tensorflow


def make_reduction(options: GradientOptions, optimizer: Any, passes: int) -> Any:
    """The reduction of GradientOptions on this backend.

    Args:
        optimizer: applies these gradients; held weakly. passes: its backward passes per step.
    Raises:
        ValueError: the algorithm cannot serve the optimizer.
        NotImplementedError: the backend is neither tensorflow nor torch.
    """
    if keras.backend.backend() not in ("tensorflow", "torch"):
        raise NotImplementedError(
            f"KERAS_BACKEND={keras.backend.backend()}: distributed optimizers work on the backends tensorflow and torch"
        )
    return current().make_reduction(options, optimizer, passes)


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
