"""Capabilities of this build, in any job, under Horovod's names."""
from bagua_hvd.core import device


def mpi_built() -> bool:
    """True: every build can use MPI, whose library is loaded at run time."""
    return True


def gloo_built() -> bool:
    """True: bagua_hvd's own transports replace gloo."""
    return True


def nccl_built() -> int:
    """NCCL's version, as 22105 for 2.21.5, if it can be loaded and BAGUA_HVD_NCCL does not disable it; else 0."""
    return device.nccl_facts()[0] if device.nccl_is_wanted() else 0


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """True: every build supports tensors on NVIDIA GPUs; the driver is loaded at run time."""
    return True


def rocm_built() -> bool:
    """False."""
    return False
