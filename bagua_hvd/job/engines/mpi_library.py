"""The MPI library whose mpirun started this process: found here, called by the core (native/transport/mpi_api.h).

Its MPI_Bcast can send rank 0's message to the others.

bagua_hvd is built without MPI. BAGUA_HVD_MPI_LIBRARY names the library to use, a file or a name that the linker finds,
unless the process has loaded one already. If the script has not initialized it, the core does, and it is finalized
when Python ends.
"""
import atexit
import functools
import os
import sys
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.native import CHARS, NULL, call, ffi, lib
from bagua_hvd.job.engines.exchange_file import ExchangeUnavailable

# Engine -> vendor of the library it needs; None: it supports several.
_VENDORS = {"openmpi": "openmpi", "hydra": "mpich", "slurm": None, "pmi": None}
_STANDARD = "libmpi_abi.so.1"
_NAMES = {"openmpi": ("libmpi.so.40", "libmpi.so", _STANDARD),
          "mpich": ("libmpi.so", "libmpi.so.12", "libmpich.so.12", _STANDARD),
          None: ("libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi.so", _STANDARD)}
_MESSAGE_NBYTES = 4096


def _candidates(vendor):
    """Files in folders named by the environment, or of this Python; the linker's folders come after them."""
    folders = [os.environ.get("OMPI_LIBDIR_LOC"), *(os.environ[name] + "/lib" for name in ("OPAL_PREFIX", "MPI_HOME",
               "I_MPI_ROOT") if name in os.environ), f"{sys.prefix}/lib"]
    paths = [f"{folder}/{name}" for folder in folders if folder for name in _NAMES[vendor]]
    return list(dict.fromkeys(os.path.realpath(path) for path in paths if os.path.exists(path)))


def start(placement: Any) -> None:
    """Loads and initializes MPI, unless that is done. ExchangeUnavailable: it is not usable here, and why."""
    if placement.engine not in _VENDORS:
        raise ExchangeUnavailable(f"{placement.engine} started this process, not mpirun or srun")
    vendor, given = _VENDORS[placement.engine], variables.read("BAGUA_HVD_MPI_LIBRARY")
    libraries = ffi.new(CHARS, ":".join([given] if given else _candidates(vendor)).encode())
    vendor_name = ffi.new(CHARS, vendor.encode()) if vendor else NULL
    _call(lib.bhvd_mpi_open, ffi.new("struct bhvd_mpi_options *", {
        "libraries": libraries, "only_these": bool(given), "vendor": vendor_name, "rank": placement.rank,
        "size": placement.size}))
    _finish_at_exit()


def _call(function, *arguments):
    try:
        call(function, *arguments)
    except HorovodInternalError as error:
        raise ExchangeUnavailable(str(error)) from None


@functools.cache        # once: not again after abandon()
def _finish_at_exit():
    atexit.register(_finish)


def abandon() -> None:
    """Called when a rank was lost: MPI is not finalized any more, since that would wait for all ranks."""
    atexit.unregister(_finish)


def _finish():
    # A process that dies of an exception must not wait for the others either: mpirun sees it end, and stops the job.
    if getattr(sys, "last_type", None) is None:
        lib.bhvd_mpi_close()


class MpiExchange:
    """The job's MPI broadcast. ExchangeUnavailable: MPI is not usable here."""

    def __init__(self, placement: Any) -> None:
        start(placement)

    def _broadcast(self, message):
        content = bytearray(message.ljust(_MESSAGE_NBYTES, b"\0"))
        _call(lib.bhvd_mpi_broadcast, ffi.from_buffer(content), len(content))
        return bytes(content).rstrip(b"\0")

    def send(self, message: Any) -> None:
        """On rank 0: broadcasts bytes to all others, none of them zero."""
        if len(message) > _MESSAGE_NBYTES:
            raise ExchangeUnavailable(f"a message of {len(message)} bytes is too long")
        self._broadcast(message)

    def receive(self, timeout: float) -> Any:
        """On other ranks: returns the bytes. Waits for rank 0 as long as MPI does."""
        return self._broadcast(b"")

    def close(self) -> None:
        """Does nothing: there is nothing to free."""
