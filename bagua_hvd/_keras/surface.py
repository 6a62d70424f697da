# ruff: noqa: F401, F403  (this file is the list of what both Keras packages have)
"""The names that scripts find in both Keras packages; what differs between them is in each."""
from bagua_hvd import algorithms
from bagua_hvd._keras.api import (
    Compression,
    allgather,
    broadcast,
    broadcast_global_variables,
    load_model,
    reducescatter,
)
from bagua_hvd._keras.consensus import consensus
from bagua_hvd.core.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.surface import *
