"""The MPI library whose mpirun started this process: found here, called by the core (native/transport/mpi_api.h).

By its MPI_Bcast rank 0's message can reach the others.

bagua_hvd is built without MPI. BAGUA_HVD_MPI_LIBRARY names the library that is to be used, a file or what the linker
finds, unless the process has loaded one already. If the script has not initialized it, the core does, and it is
finalized when Python ends.
"""
import atexit
import os
import sys
from typing import Any

from bagua_hvd.core import native, variables
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job.engines.exchange_file import NoExchange

# Engine -> whose library it needs; None: it serves several.
_VENDORS = {"openmpi": "openmpi", "hydra": "mpich", "slurm": None, "pmi": None}
_STANDARD = "libmpi_abi.so.1"
_NAMES = {"openmpi": ("libmpi.so.40", "libmpi.so", _STANDARD),
          "mpich": ("libmpi.so", "libmpi.so.12", "libmpich.so.12", _STANDARD),
          None: ("libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi.so", _STANDARD)}
_MESSAGE_NBYTES = 4096
_state = {"registered": False, "abandoned": False}


def _candidates(vendor):
    """Files that lie where the environment or this Python's installation says; the linker's folders come after them."""
    folders = [os.environ.get("OMPI_LIBDIR_LOC"), *(os.environ[name] + "/lib" for name in ("OPAL_PREFIX", "MPI_HOME",
               "I_MPI_ROOT") if name in os.environ), f"{sys.prefix}/lib"]
    paths = [f"{folder}/{name}" for folder in folders if folder for name in _NAMES[vendor]]
    return list(dict.fromkeys(os.path.realpath(path) for path in paths if os.path.exists(path)))


def start(placement: Any) -> None:
    """Loads and initializes MPI, unless that is done. NoExchange: it is not usable here, and why."""
    if placement.engine not in _VENDORS:
        raise NoExchange(f"{placement.engine} started this process, not mpirun or srun")
    vendor, given = _VENDORS[placement.engine], variables.read("BAGUA_HVD_MPI_LIBRARY")
    try:
        native.mpi_open([given] if given else _candidates(vendor), vendor, placement.rank, placement.size,
                        only_these=bool(given))
    except HorovodInternalError as error:
        raise NoExchange(str(error)) from None
    if not _state["registered"]:
        _state["registered"] = True
        atexit.register(_finish)


def abandon() -> None:
    """A rank was lost: nobody finalizes MPI any more, since that waits for all."""
    _state["abandoned"] = True


def _finish():
    # One that dies of an exception must not wait for the others either: mpirun sees it end, and stops the job.
    if not _state["abandoned"] and getattr(sys, "last_type", None) is None:
        native.mpi_close()


class MpiExchange:
    """The broadcast of the job. NoExchange: MPI is not usable here."""

    def __init__(self, placement: Any) -> None:
        start(placement)

    def _broadcast(self, message):
        try:
            return native.mpi_broadcast(message.ljust(_MESSAGE_NBYTES, b"\0")).rstrip(b"\0")
        except HorovodInternalError as error:
            raise NoExchange(str(error)) from None

    def send(self, message: Any) -> None:
        """Rank 0: bytes for all others, none of them zero."""
        if len(message) > _MESSAGE_NBYTES:
            raise NoExchange(f"a message of {len(message)} bytes is too long")
        self._broadcast(message)

    def receive(self, timeout: float) -> Any:
        """The others: the bytes. Waits for rank 0 as long as MPI does."""
        return self._broadcast(b"")

    def close(self) -> None:
        """Nothing is left to be freed."""
