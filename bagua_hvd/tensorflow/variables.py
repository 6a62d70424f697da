"""What a variable is to TensorFlow."""
import tensorflow as tf


def native_variable(variable):
    """The tf.Variable behind a variable of Keras, and other things as they are."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable
