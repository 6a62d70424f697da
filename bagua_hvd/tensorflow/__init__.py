# ruff: noqa: F401  (this file is the list of what scripts use)
"""bagua_hvd for TensorFlow: `import bagua_hvd.tensorflow as hvd` for `import horovod.tensorflow as hvd`."""
from bagua_hvd import algorithms
from bagua_hvd.common.basics import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from bagua_hvd.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from bagua_hvd.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from bagua_hvd.tensorflow.bridge import Bridge as _Bridge
