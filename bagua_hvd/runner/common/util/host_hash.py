"""The same function of bagua_hvd/job/environment.py, under Horovod's path."""
from bagua_hvd.job.environment import host_hash as host_hash
