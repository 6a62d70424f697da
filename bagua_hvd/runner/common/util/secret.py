"""bagua_hvd/job/secret.py under Horovod's path."""
from bagua_hvd.job.secret import *  # noqa: F403
