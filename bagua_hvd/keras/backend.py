"""Loads the front end of the backend that Keras runs on, which supplies the parts for bagua_hvd/_keras."""
import keras

if keras.backend.backend() != "torch":      # _keras finds torch's front end by itself
    import bagua_hvd.tensorflow  # noqa: F401
