"""bagua_hvd/job/basics.py under Horovod's path."""
from bagua_hvd.job.basics import *  # noqa: F403
