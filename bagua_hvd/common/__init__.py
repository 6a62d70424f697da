"""Horovod's paths, for scripts and libraries that import from there. bagua_hvd itself does not use them."""
