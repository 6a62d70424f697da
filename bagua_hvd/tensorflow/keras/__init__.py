# ruff: noqa: F401, F403  (this file lists the names that scripts use)
"""bagua_hvd for tf.keras: `import bagua_hvd.tensorflow.keras as hvd` for `import horovod.tensorflow.keras as hvd`."""
from bagua_hvd._keras.api import DistributedOptimizer, allreduce
from bagua_hvd._keras.surface import *
from bagua_hvd.job import basics as _basics
from bagua_hvd.job.process_sets import add_process_set, remove_process_set
from bagua_hvd.tensorflow.keras import callbacks, elastic

__all__ = [name for name in globals() if not name.startswith("_")]
