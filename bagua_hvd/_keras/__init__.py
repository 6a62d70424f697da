"""Common part of bagua_hvd.keras and bagua_hvd.tensorflow.keras: everything but their signatures."""
