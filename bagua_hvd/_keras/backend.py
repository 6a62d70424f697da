"""What the backend that Keras runs on supplies. Everything else in this folder is the same on all of them.

TensorFlow's front end is built on this folder, and registers what it has for Keras; torch's lies below. For reductions
see reduction.py.
"""
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import keras

from bagua_hvd.reduction.options import GradientOptions


@dataclass(frozen=True)
class Backend:
    """What a backend has for Keras.

    Attributes:
        make_reduction: function of (options, optimizer=, passes=); see make_reduction().
        Compression: classes none and fp16.
        shared_reductions: what beside optimizers has numbers; see reduction.py.
        translated_errors: makes a context in which a failed collective raises HorovodInternalError.
        broadcast_global_variables: function of the root, for graphs of TensorFlow 1; None: there are none.
        wrap_legacy, load_legacy_model: wrap() and load_model() of optimizer.py for tf_keras; None: it cannot be served.
    """

    make_reduction: Callable[..., Any]
    Compression: Any
    shared_reductions: tuple = ()
    translated_errors: Callable[[], AbstractContextManager] = nullcontext
    broadcast_global_variables: Callable[[int], Any] | None = None
    wrap_legacy: Any = None
    load_legacy_model: Any = None


_backends: dict[str, Backend] = {}


def register(name: str, backend: Backend) -> None:
    """Makes a Backend known for KERAS_BACKEND=name."""
    _backends[name] = backend


def _find(name):
    if name == "torch" and name not in _backends:
        from bagua_hvd._keras.torch_reduction import Reduction
        from bagua_hvd.torch.compression import Compression

        register(name, Backend(Reduction, Compression))
    return _backends.get(name)


def current() -> Backend:
    """The Backend that Keras runs on; of one that has none, what TensorFlow's has, but for reductions."""
    return _find(keras.backend.backend()) or of_tf_keras()


def of_tf_keras() -> Backend:
    """The Backend of tf_keras, TensorFlow's. RuntimeError: nobody has imported its front end."""
    if "tensorflow" not in _backends:
        raise RuntimeError("models and optimizers of tf_keras need TensorFlow's front end: import bagua_hvd.tensorflow")
    return _backends["tensorflow"]


def make_reduction(options: GradientOptions, optimizer: Any, passes: int) -> Any:
    """The reduction of GradientOptions on this backend.

    Args:
        optimizer: whose gradients they are; held weakly. passes: its backward passes for each step.
    Raises:
        ValueError: the algorithm cannot serve the optimizer.
        NotImplementedError: the backend is neither tensorflow nor torch.
    """
    backend = _find(keras.backend.backend())
    if backend is None:
        raise NotImplementedError(
            f"KERAS_BACKEND={keras.backend.backend()}: distributed optimizers work on the backends tensorflow and torch"
        )
    return backend.make_reduction(options, optimizer=optimizer, passes=passes)


def as_written(function: Callable[..., Any]) -> Any:
    """Decorator: TensorFlow's AutoGraph, which would rewrite it and all that it calls, leaves it alone."""
    if keras.backend.backend() != "tensorflow":
        return function
    import tensorflow as tf

    return tf.autograph.experimental.do_not_convert(function)


def broadcast_global_variables(root_rank: int) -> Any:
    """For graphs of tf.compat.v1: the operation that gives every rank the root's values of all variables.

    Args:
        root_rank: global rank.
    Raises:
        RuntimeError: in eager mode, and on other backends: BroadcastGlobalVariablesCallback does it there.
    """
    broadcast = current().broadcast_global_variables if keras.backend.backend() == "tensorflow" else None
    if broadcast is None:
        raise RuntimeError(
            "broadcast_global_variables() is for graphs: use hvd.callbacks.BroadcastGlobalVariablesCallback"
        )
    return broadcast(root_rank)
