"""The same names of bagua_hvd/job/channel.py, under Horovod's path."""
from bagua_hvd.job.channel import HOROVOD_SECRET_KEY as HOROVOD_SECRET_KEY
from bagua_hvd.job.channel import make_secret_key as make_secret_key
