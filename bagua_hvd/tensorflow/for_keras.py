"""What Keras is supplied with where it runs on TensorFlow: registered with bagua_hvd/_keras when this is imported."""
import functools

from bagua_hvd._keras import backend
from bagua_hvd.tensorflow import tf_keras
from bagua_hvd.tensorflow.compression import Compression
from bagua_hvd.tensorflow.elastic import translated_errors
from bagua_hvd.tensorflow.functions import broadcast_global_variables
from bagua_hvd.tensorflow.reduction import Reduction, shared_reductions

backend.register("tensorflow", backend.Backend(
    functools.partial(Reduction, weights=True), Compression, (shared_reductions,), translated_errors,
    broadcast_global_variables, tf_keras.wrap, tf_keras.load_model,
))
