"""tf_keras, the Keras 2 that continues beside Keras 3: with TF_USE_LEGACY_KERAS=1, tf.keras is tf_keras.

The Keras packages serve models of both. This module has the differences.
"""
import os
import sys
from typing import Any

import keras


def in_use() -> bool:
    """Whether tf.keras is tf_keras."""
    return os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")


def is_optimizer(optimizer: Any) -> bool:
    """Whether it is an optimizer of tf_keras.optimizers, or of tf_keras.optimizers.legacy."""
    tf_keras = sys.modules.get("tf_keras")
    return tf_keras is not None and isinstance(
        optimizer, (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer)
    )


def session_backend(value: Any) -> Any:
    """tf_keras.backend for a value in a graph of TensorFlow 1, which only Keras' session can read; else None."""
    tf_keras = sys.modules.get("tf_keras")
    return tf_keras.backend if tf_keras is not None and getattr(value, "graph", None) is not None else None


def build(optimizer: Any, variables: Any) -> None:
    """Creates an optimizer's variables, of either Keras."""
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    else:                               # tf_keras.optimizers.legacy
        optimizer._create_all_weights(variables)


def variables(optimizer: Any) -> list:
    """All variables of an optimizer of either Keras; [] for None."""
    if optimizer is None:
        return []
    found = optimizer.variables         # tf_keras has a function of that name
    return list(found() if callable(found) else found)


def scale(variable: Any, factor: float) -> None:
    """Multiplies a variable of either Keras by a number."""
    session = session_backend(variable)
    if session is None:
        variable.assign(variable * factor)
    else:
        session.set_value(variable, session.get_value(variable) * factor)


def velocities(optimizer: Any, weights: Any) -> Any:
    """The variables in which SGD or RMSprop of either Keras accumulates its steps; none before build() or for others.

    Muon's momentums do not count: they are sums of plain gradients, without a learning rate.
    """
    if hasattr(optimizer, "get_slot"):  # tf_keras.optimizers.legacy
        built = "momentum" in optimizer.get_slot_names()
        return [optimizer.get_slot(weight, "momentum") for weight in weights] if built else []
    packages = [package for package in (keras, sys.modules.get("tf_keras")) if package is not None]
    if not any(isinstance(optimizer, (each.optimizers.SGD, each.optimizers.RMSprop)) for each in packages):
        return ()
    return getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", ())
