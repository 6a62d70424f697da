"""What a variable is to TensorFlow."""
from typing import Any

import tensorflow as tf


def native_variable(variable: Any) -> Any:
    """The tf.Variable behind a variable of Keras, and other things as they are."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable
