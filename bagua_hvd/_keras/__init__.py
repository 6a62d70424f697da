"""What bagua_hvd.keras and bagua_hvd.tensorflow.keras share: everything but their signatures."""
