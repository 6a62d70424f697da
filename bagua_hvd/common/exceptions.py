"""bagua_hvd/core/exceptions.py under Horovod's path."""
from bagua_hvd.core.exceptions import *  # noqa: F403
