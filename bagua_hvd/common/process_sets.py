"""Horovod's path to what is in bagua_hvd/job/process_sets.py."""
from bagua_hvd.job.process_sets import *  # noqa: F403
