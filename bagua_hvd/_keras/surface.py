# ruff: noqa: F401, F403  (this file lists the names of both Keras packages)
"""The names that scripts find in both Keras packages; each adds its own."""
from bagua_hvd import algorithms
from bagua_hvd._keras.api import (
    Compression,
    allgather,
    broadcast,
    broadcast_global_variables,
    load_model,
    reducescatter,
)
from bagua_hvd._keras.values import consensus
from bagua_hvd.core.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from bagua_hvd.job.basics import *
from bagua_hvd.job.process_sets import ProcessSet
