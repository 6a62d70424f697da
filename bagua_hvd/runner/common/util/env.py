"""The same function of bagua_hvd/job/environment.py, under Horovod's path."""
from bagua_hvd.job.environment import get_env_rank_and_size as get_env_rank_and_size
