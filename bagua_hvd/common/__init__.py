"""Horovod's paths, for scripts and libraries that import from there. Nothing of bagua_hvd itself does."""
