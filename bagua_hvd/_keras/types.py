"""Types of arguments that Keras' and TensorFlow's functions share."""
from collections.abc import Sequence
from typing import TypeVar

import keras

# Of Keras 3, tf_keras or tf.compat.v1. What a function returns for one is of a class that derives from the given one's.
OptimizerT = TypeVar("OptimizerT")
Groups = int | Sequence[Sequence[keras.Variable]] | None
Layers = keras.layers.Layer | Sequence[keras.layers.Layer] | None
