"""This process's rank, before init() and without the native core."""
import os

# The variables by which our launcher tells a process its place in the job.
PLACE = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK",
         "HOROVOD_CROSS_SIZE")
# In order of precedence: our launcher, Open MPI, MPICH and its relatives.
_PAIRS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def get_env_rank_and_size() -> tuple[int, int]:
    """(rank, size) as set by the launcher of this process; (0, 1) without a launcher.

    Raises:
        RuntimeError: only one variable of a pair is set. ValueError: not a number.
    """
    for rank_name, size_name in _PAIRS:
        rank, size = os.environ.get(rank_name), os.environ.get(size_name)
        if rank is not None and size is not None:
            try:
                return int(rank), int(size)
            except ValueError:
                raise ValueError(f"environment variables {rank_name}={rank!r}, {size_name}={size!r}: expected two "
                                 "integers") from None
        if rank is not None or size is not None:
            present, missing = (rank_name, size_name) if size is None else (size_name, rank_name)
            raise RuntimeError(f"environment variable {present} is set, but {missing} is not: set both or neither")
    return 0, 1
