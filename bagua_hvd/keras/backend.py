"""Loads the front end of the backend that Keras runs on, which supplies what bagua_hvd/_keras needs of it."""
import keras

if keras.backend.backend() != "torch":      # whose front end _keras finds by itself
    import bagua_hvd.tensorflow  # noqa: F401
