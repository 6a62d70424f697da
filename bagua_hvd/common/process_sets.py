"""bagua_hvd/job/process_sets.py under Horovod's path."""
from bagua_hvd.job.process_sets import *  # noqa: F403
