"""Types of arguments that functions of Keras and TensorFlow share."""
from collections.abc import Sequence
from typing import TypeVar

import keras

# Of Keras 3, tf_keras or tf.compat.v1. Functions return an optimizer whose class derives from the given one's.
OptimizerT = TypeVar("OptimizerT")
Groups = int | Sequence[Sequence[keras.Variable]] | None
Layers = keras.layers.Layer | Sequence[keras.layers.Layer] | None
