"""The engines that start the ranks of a job: mpirun, srun, torchrun, or only torch's variables. Which one started this
process, and how rank 0 sends a message to the others (see join.py):

    FileExchange     a file in a private folder: ranks of one host, or with a common home
    MpiExchange      MPI's own broadcast, by the library whose mpirun started this process
    StoreMessage     torch's store, torchrun's or rank 0's
"""
import atexit
import functools
import hashlib
import os
import stat
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.native import CHARS, NULL, call, ffi, lib


class ExchangeUnavailable(RuntimeError):
    """This exchange is not available; the message says why."""


@dataclass(frozen=True)
class Placement:
    """This process in a job that another engine started.

    Attributes:
        engine: "torchrun", "openmpi", "hydra" (MPICH and its relatives), "slurm", "pmi", or "env": only the variables
            of torch's env:// are set, as by Kubernetes' PyTorchJob.
        local_size: ranks on this host; None: the engine does not say.
        job: text that identifies the job among all of this user's jobs, on all its hosts; None: the engine has none.
    """

    engine: str
    rank: int
    size: int
    local_size: int | None
    job: str | None


# In order: an engine that another one may have started comes before it. (engine, a variable that only it sets, rank,
# size, local size, variables that name the job)
_ENGINES = (
    ("torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", ()),
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
     ("PMIX_NAMESPACE",)),
    ("hydra", "MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ()),
    # Set by srun, and not by sbatch for the batch script itself.
    ("slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", None,
     # Clusters that share a home may use the same numbers; the port belongs to this srun.
     ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_LAUNCHER_PORT")),
    ("pmi", "PMI_RANK", "PMI_RANK", "PMI_SIZE", None, ("PMI_JOBID",)),
    ("env", "MASTER_PORT", "RANK", "WORLD_SIZE", None, ()),
)


def detect(environ: Any = None) -> Any:
    """The Placement that the environment describes; None: no engine. ValueError: variables are incomplete or wrong."""
    environ = os.environ if environ is None else environ
    for engine, mark, rank, size, local_size, job in _ENGINES:
        # A notebook may have exported MASTER_PORT alone, for ranks that it starts later.
        if mark in environ and (engine != "env" or rank in environ or size in environ):
            ranks = number(environ, size, engine)
            local = ranks if environ.get("SLURM_STEP_NUM_NODES") == "1" else None
            if local_size is not None:
                local = number(environ, local_size, engine)
            names = [environ[name] for name in job if name in environ]
            return Placement(engine, number(environ, rank, engine), ranks, local,
                             "-".join([engine, *names]) if names else None)
    return None


def number(environ: Any, name: str, engine: str) -> int:
    """The variable's value. ValueError: it is not set, or no number."""
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise wrong(environ, name, engine) from None


def wrong(environ: Any, name: str, engine: str) -> ValueError:
    """The error for a variable that is missing or malformed."""
    value = repr(environ[name]) if name in environ else "not set"
    return ValueError(f"this process was started by {engine}, but environment variable {name} is {value}: start the "
                      "job with baguarun instead")


# ---- a file

# Processes that start the ranks of a host; the kernel truncates their names.
_STARTERS = ("hydra_pmi_proxy", "mpiexec", "mpirun", "prterun", "prted", "orted", "slurmstepd")
_FILE_POLL_SECONDS = 0.02


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
    """A file named after the job, in a folder that only this user can access.

    For one host the folder is in the temporary folder; for several hosts it is ~/.bagua_hvd, which they must share.

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
            time.sleep(_FILE_POLL_SECONDS)

    def close(self) -> None:
        """On rank 0, once all ranks have received."""
        self._path.unlink(missing_ok=True)


# ---- torch's store

# torchrun's agent keeps one. If the ranks have torch's variables but no agent, rank 0 keeps the store until all ranks
# are connected. The store does not authenticate clients: any process that reaches MASTER_PORT can read the message,
# like all data of torch.distributed there.

_STORE_POLL_SECONDS = 0.005, 0.1          # first, last


def attempt(store: Any, rank: int, size: int, seconds: float) -> Any:
    """A part of the store, empty at first, for this attempt of the ranks to connect; all of them call this.

    A store keeps data of earlier attempts: torchrun's agent has one store for all restarts, and a destroyed group may
    be made again. So rank 0 chooses a new name for each attempt. A rank asks for it under a key that is new, too; rank
    0 responds to every request, also from dead ranks of earlier attempts, until all ranks confirm the name.

    Raises:
        RuntimeError: a rank did not call within `seconds`.
    """
    from torch.distributed import PrefixStore

    if size == 1:
        return store
    if rank == 0:
        name = f"bagua_hvd/{uuid.uuid4().hex}"
        _respond(store, name, set(range(1, size)), seconds)
        return PrefixStore(name, store)
    asked = uuid.uuid4().hex
    store.set(f"bagua_hvd/ask/{rank}", asked)
    try:
        store.wait([f"bagua_hvd/answer/{asked}"], timedelta(seconds=seconds))
    except RuntimeError as error:
        raise RuntimeError(f"rank 0 left no message in torch's store within {seconds:g} s: did it call init()? "
                           f"({str(error).splitlines()[0]})") from None
    name = store.get(f"bagua_hvd/answer/{asked}").decode()
    store.set(f"{name}/has/{rank}", "")
    return PrefixStore(name, store)


def _respond(store, name, missing, seconds):
    deadline, pause = time.monotonic() + seconds, _STORE_POLL_SECONDS[0]
    responded: dict[int, str] = {}
    while True:
        for rank in sorted(missing):
            if store.check([f"bagua_hvd/ask/{rank}"]):
                asked = store.get(f"bagua_hvd/ask/{rank}").decode()
                if responded.get(rank) != asked:
                    store.set(f"bagua_hvd/answer/{asked}", name)
                    responded[rank] = asked
                elif store.check([f"{name}/has/{rank}"]):
                    missing.discard(rank)
        if not missing:
            return
        if time.monotonic() > deadline:
            named = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, sorted(missing)))}"
            raise RuntimeError(f"{named} left no message in torch's store within {seconds:g} s: did every rank call "
                               "init()?")
        time.sleep(pause)
        pause = min(2 * pause, _STORE_POLL_SECONDS[1])


class StoreMessage:
    """A message in a torch store, in a part made by attempt(). As FileExchange."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def send(self, message: Any) -> None:
        self._store.set("message", message)

    def receive(self, timeout: float) -> Any:
        try:
            self._store.wait(["message"], timedelta(seconds=timeout))
        except RuntimeError as error:
            raise ExchangeUnavailable(f"rank 0 left no message in torch's store within {timeout:g} s: did it call "
                                      f"init()? ({str(error).splitlines()[0]})") from None
        return bytes(self._store.get("message"))

    def close(self) -> None:
        with suppress(RuntimeError):    # the store cannot delete, or its host is gone
            self._store.delete_key("message")
        self._store = None


def store_exchange(placement: Any, timeout: float) -> StoreMessage:
    """The message in the store of the job.

    Args:
        placement: of this process, by torchrun or env. timeout: seconds.
    Raises:
        ExchangeUnavailable, RuntimeError: there is no such store, or a rank did not connect.
        ValueError: MASTER_ADDR or MASTER_PORT is not set, or malformed.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    if placement.engine == "torchrun" and not agent:
        raise ExchangeUnavailable("torchrun keeps no store (TORCHELASTIC_USE_AGENT_STORE is not True)")
    try:
        from torch.distributed import TCPStore
    except ImportError:
        raise ExchangeUnavailable("the store at MASTER_ADDR:MASTER_PORT needs torch") from None

    address, port = os.environ.get("MASTER_ADDR"), number(os.environ, "MASTER_PORT", placement.engine)
    if not address:
        raise wrong(os.environ, "MASTER_ADDR", placement.engine)
    if not 0 < port < 1 << 16:
        raise wrong(os.environ, "MASTER_PORT", placement.engine)
    try:
        # multi_tenant: the script's own torch.distributed may use the same port.
        store = TCPStore(address, port, is_master=not agent and placement.rank == 0, wait_for_workers=False,
                         timeout=timedelta(seconds=timeout), multi_tenant=True)
    except RuntimeError as error:
        in_use = "EADDRINUSE" in str(error)
        why = "MASTER_PORT is in use on this host; set another one" if in_use else str(error).splitlines()[0]
        raise ExchangeUnavailable(f"torch's store at {address}:{port}: {why}") from None
    return StoreMessage(attempt(store, placement.rank, placement.size, timeout))


# ---- MPI

# bagua_hvd is built without MPI: the core calls the library (native/transport/mpi_api.h). BAGUA_HVD_MPI_LIBRARY names
# the one to use, a file or a name that the linker finds, unless the process has loaded one already. If the script has
# not initialized it, the core does, and it is finalized when Python ends.

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


def start_mpi(placement: Any) -> None:
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


@functools.cache        # once: not again after abandon_mpi()
def _finish_at_exit():
    atexit.register(_finish)


def abandon_mpi() -> None:
    """Called when a rank was lost: MPI is not finalized any more, since that would wait for all ranks."""
    atexit.unregister(_finish)


def _finish():
    # A process that dies of an exception must not wait for the others either: mpirun sees it end, and stops the job.
    if getattr(sys, "last_type", None) is None:
        lib.bhvd_mpi_close()


class MpiExchange:
    """The job's MPI broadcast. As FileExchange, but receive() waits for rank 0 as long as MPI does."""

    def __init__(self, placement: Any) -> None:
        start_mpi(placement)

    def _broadcast(self, message):
        content = bytearray(message.ljust(_MESSAGE_NBYTES, b"\0"))
        _call(lib.bhvd_mpi_broadcast, ffi.from_buffer(content), len(content))
        return bytes(content).rstrip(b"\0")

    def send(self, message: Any) -> None:
        if len(message) > _MESSAGE_NBYTES:
            raise ExchangeUnavailable(f"a message of {len(message)} bytes is too long")
        self._broadcast(message)

    def receive(self, timeout: float) -> Any:
        return self._broadcast(b"")

    def close(self) -> None:
        """Does nothing: there is nothing to free."""
