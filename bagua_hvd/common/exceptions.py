"""Horovod's path to what is in bagua_hvd/core/exceptions.py."""
from bagua_hvd.core.exceptions import *  # noqa: F403
