"""Rank 0's message for the others, in a file named after the job, in a folder that only this user can access.

For one host the folder is in the temporary folder; for several hosts it is ~/.bagua_hvd, which they must share.
"""
import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

# Processes that start the ranks of a host; the kernel truncates their names.
_STARTERS = ("hydra_pmi_proxy", "mpiexec", "mpirun", "prterun", "prted", "orted", "slurmstepd")
_POLL_SECONDS = 0.02


class ExchangeUnavailable(RuntimeError):
    """This exchange is not available; the message says why."""


def folder(one_host: Any) -> Any:
    """The folder, created if needed. ExchangeUnavailable: other users can access it."""
    path = Path(tempfile.gettempdir()) / f"bagua_hvd-{os.getuid()}" if one_host else Path.home() / ".bagua_hvd"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ExchangeUnavailable(f"{path}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ExchangeUnavailable(f"{path} is not a folder of this user alone: remove it, or `chmod 700` it")
    return path


def starter() -> str:
    """Name, pid and start time of the process that started this host's ranks, found among the ancestors."""
    pid = os.getppid()
    while pid > 1:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            break
        fields = rest.split()
        if name.startswith(_STARTERS):
            return f"{name}-{pid}-{fields[19]}"
        pid = int(fields[1])
    raise ExchangeUnavailable("the process that started the ranks of this host was not found")


class FileExchange:
    """The file of a job.

    Args:
        job: the job's name; None: derived from the process that started the ranks, on one host only.
    Attributes:
        may_change: the message may be left over from a rank 0 that was killed, and be replaced later.
    """

    may_change = True

    def __init__(self, job: Any, one_host: Any) -> None:
        if job is None and not one_host:
            raise ExchangeUnavailable("the engine gives its job no name")
        name = hashlib.sha256((job or starter()).encode()).hexdigest()[:32]
        self._path = folder(one_host) / name

    def send(self, message: Any) -> None:
        """On rank 0: stores bytes for all others. ExchangeUnavailable: they cannot be stored."""
        part = self._path.with_suffix(".part")
        try:
            part.unlink(missing_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(message)
            os.replace(part, self._path)
        except OSError as error:
            raise ExchangeUnavailable(f"rank 0 cannot store its message at {self._path}: {error.strerror}") from None

    def receive(self, timeout: float) -> Any:
        """On other ranks: returns the bytes. ExchangeUnavailable: there are none after `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            try:
                return self._path.read_bytes()
            except FileNotFoundError:
                pass
            if time.monotonic() > end:
                raise ExchangeUnavailable(f"rank 0 left no message at {self._path} within {timeout:g} s: did it call "
                                          "init(), and do all hosts share that folder?")
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """On rank 0, once all ranks have received."""
        self._path.unlink(missing_ok=True)
