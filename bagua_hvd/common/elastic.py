"""Horovod's path to what is in bagua_hvd/job/elastic.py."""
from bagua_hvd.job.elastic import *  # noqa: F403
