"""Converts variables to TensorFlow's own."""
from typing import Any

import tensorflow as tf


def native_variable(variable: Any) -> Any:
    """The tf.Variable behind a Keras variable; other values unchanged."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable
