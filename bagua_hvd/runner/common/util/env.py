"""bagua_hvd/job/env.py under Horovod's path."""
from bagua_hvd.job.env import *  # noqa: F403
