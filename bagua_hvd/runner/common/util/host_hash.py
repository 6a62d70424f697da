"""bagua_hvd/job/host_hash.py under Horovod's path."""
from bagua_hvd.job.host_hash import *  # noqa: F403
