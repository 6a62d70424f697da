"""Shared by the NCCL tests: ranks with their own fake GPUs, on simulated hosts."""
import os

from device_arrays import FakePlacement, fake_cuda, own_device
from world import World

# NCCL reduces these; other dtypes are copied to the host.
REDUCED = ["uint8", "int8", "int32", "int64", "float16", "float32", "float64", "bfloat16"]
FOR_ALLREDUCE, ONLY = 1, 2              # bhvd_context_options.nccl_hierarchical
_boot = os.urandom(4).hex()


def on_hosts(letters, levels=ONLY):
    """A World with the ranks on the hosts named by the letters."""
    return World(len(letters), "auto", hosts=[f"{_boot}.{letter}" for letter in letters], nccl_hierarchical=levels)


def placements(n):
    return [FakePlacement(own_device(rank)) for rank in range(n)]


def groups():
    """Number of groups that NCCL has launched, on all ranks of this process."""
    return fake_cuda().nccl_groups()
