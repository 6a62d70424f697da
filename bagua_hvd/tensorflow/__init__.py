# ruff: noqa: E402, F401, F403  (this file lists the names that scripts use)
"""bagua_hvd for TensorFlow: write `import bagua_hvd.tensorflow as hvd` for `import horovod.tensorflow as hvd`."""
from bagua_hvd.core.requirement import require as _require

_require("TensorFlow", (2, 16))       # before anything else can fail

from bagua_hvd import algorithms
from bagua_hvd._keras.values import consensus
from bagua_hvd.core.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from bagua_hvd.job.basics import *
from bagua_hvd.job.basics import Adasum, Max, Min, Product, is_homogeneous
from bagua_hvd.job.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from bagua_hvd.tensorflow import elastic
from bagua_hvd.tensorflow import tf_keras as _tf_keras
from bagua_hvd.tensorflow.compression import Compression
from bagua_hvd.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from bagua_hvd.tensorflow.gradient_aggregation import (
    LocalGradientAggregationHelper,
    LocalGradientAggregationHelperEager,
)
from bagua_hvd.tensorflow.mpi_ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    check_num_rank_power_of_2,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    handle_average_backwards_compatibility,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from bagua_hvd.tensorflow.optimizer import DistributedOptimizer
from bagua_hvd.tensorflow.sync_batch_norm import SyncBatchNormalization
from bagua_hvd.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from bagua_hvd.tensorflow.util import _cache, _executing_eagerly, _make_subgraph, refs_to_vars, vars_to_refs

__all__ = [name for name in globals() if not name.startswith("_")]
