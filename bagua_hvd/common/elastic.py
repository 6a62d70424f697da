"""bagua_hvd/job/elastic.py under Horovod's path."""
from bagua_hvd.job.elastic import *  # noqa: F403
