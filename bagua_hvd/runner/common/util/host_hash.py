"""Horovod's path to what is in bagua_hvd/job/host_hash.py."""
from bagua_hvd.job.host_hash import *  # noqa: F403
