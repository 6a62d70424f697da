"""What this build can do, whatever job it is in; Horovod asks by these names."""
from bagua_hvd.core import device


def mpi_built() -> bool:
    """True: every build can use an MPI, which is found at run time."""
    return True


def gloo_built() -> bool:
    """True: bagua_hvd's own transports take gloo's place."""
    return True


def nccl_built() -> int:
    """NCCL's version, as 22105 for 2.21.5, where it can be loaded and is wanted (BAGUA_HVD_NCCL); else 0."""
    return device.nccl_facts()[0] if device.nccl_is_wanted() else 0


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """True: every build serves tensors on NVIDIA's GPUs; the driver is found at run time."""
    return True


def rocm_built() -> bool:
    """False."""
    return False
