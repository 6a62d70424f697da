"""Horovod's path to what is in bagua_hvd/job/basics.py."""
from bagua_hvd.job.basics import *  # noqa: F403
