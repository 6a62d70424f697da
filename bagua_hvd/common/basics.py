"""bagua_hvd/job/basics.py under Horovod's path."""
from bagua_hvd.job.basics import *  # noqa: F403
from bagua_hvd.job.basics import Adasum, Max, Min, Product, is_homogeneous  # noqa: F401
