"""Horovod's path to what is in bagua_hvd/job/secret.py."""
from bagua_hvd.job.secret import *  # noqa: F403
