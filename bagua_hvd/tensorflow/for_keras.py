"""The parts of the TensorFlow backend that Keras needs. Importing this registers them with bagua_hvd/_keras."""
from bagua_hvd._keras import backend
from bagua_hvd.tensorflow import tf_keras
from bagua_hvd.tensorflow.compression import Compression
from bagua_hvd.tensorflow.elastic import translated_errors
from bagua_hvd.tensorflow.functions import broadcast_global_variables
from bagua_hvd.tensorflow.reduction import Reduction

backend.register(backend.Backend(
    Reduction, Compression, translated_errors, broadcast_global_variables, tf_keras.wrap, tf_keras.load_model))
