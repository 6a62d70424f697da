# ruff: noqa: F401  (this file is the list of what every front end has of the job)
"""The names of a job that scripts find in every front end."""
from bagua_hvd.job.basics import (
    Average,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
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
    statistics,
    stop_timeline,
)
from bagua_hvd.job.process_sets import global_process_set
