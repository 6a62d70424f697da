"""Horovod's path to what is in bagua_hvd/job/env.py."""
from bagua_hvd.job.env import *  # noqa: F403
