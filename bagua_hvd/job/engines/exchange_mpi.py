"""Rank 0's message for the others by MPI_Bcast of the MPI whose mpirun started this process."""
from typing import Any

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job.engines import mpi_library
from bagua_hvd.job.engines.exchange_file import NoExchange

_MESSAGE_NBYTES = 4096


class MpiExchange:
    """The broadcast of the job. NoExchange: MPI is not usable here."""

    def __init__(self, placement: Any) -> None:
        mpi_library.start(placement)

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
