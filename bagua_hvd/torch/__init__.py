# ruff: noqa: E402, F401, F403  (this file lists the names that scripts use)
"""bagua_hvd for PyTorch: write `import bagua_hvd.torch as hvd` instead of `import horovod.torch as hvd`."""
from bagua_hvd.core.requirement import require as _require

_require("Torch", (2, 3))       # before anything else can fail

import torch as _torch

from bagua_hvd import algorithms
from bagua_hvd.core.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from bagua_hvd.job.basics import *
from bagua_hvd.job.basics import Adasum, Max, Min, Product, wait_for_gpus
from bagua_hvd.job.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from bagua_hvd.torch import elastic
from bagua_hvd.torch.compression import Compression
from bagua_hvd.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    clip_grad_norm_,
    consensus,
)
from bagua_hvd.torch.load_balancing import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler
from bagua_hvd.torch.mpi_ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from bagua_hvd.torch.optimizer import DistributedOptimizer, QAdamOptimizer
from bagua_hvd.torch.sync_batch_norm import SyncBatchNorm

__all__ = [name for name in globals() if not name.startswith("_")]


def _check_has_gpu():
    return _torch.cuda.is_available()
