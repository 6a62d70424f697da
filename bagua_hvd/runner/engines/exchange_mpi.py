"""Rank 0's message for the others by MPI_Bcast of the MPI whose mpirun started this process.

MPI is found and called by ctypes, so that bagua_hvd is built without it. Two binary interfaces: MPICH's (also Intel
MPI, MVAPICH and others), and Open MPI's. If the script has not initialized MPI, this does, and finalizes it when Python
ends.
"""
import atexit
import ctypes
import os
import sys
from pathlib import Path

from bagua_hvd.runner.engines.exchange_file import NoExchange

_MESSAGE_NBYTES = 4096
_THREAD_SERIALIZED = 2
_MPICH_COMM_WORLD, _MPICH_BYTE = 0x44000000, 0x4C00010D
_VERSION_MAX = 16384
_FAMILIES = {"openmpi": "Open MPI", "hydra": "MPICH", "slurm": "", "pmi": ""}
_loaded = {}        # engine -> _Mpi: one for this process


def _candidates(engine):
    """Files and names to try, the likeliest first."""
    # What mpi4py or another library brought must not get a second one beside it.
    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split()[-1]
            if Path(path).name.startswith(("libmpi.so", "libmpich.so", "libmpi_abi.so")):
                yield path
    except OSError:
        pass
    folders = [os.environ.get("OMPI_LIBDIR_LOC"), *(os.environ[name] + "/lib" for name in ("OPAL_PREFIX", "MPI_HOME",
               "I_MPI_ROOT") if name in os.environ), f"{sys.prefix}/lib", None]
    names = ["libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi.so"]
    for folder in folders:
        for name in reversed(names[1:]) if engine == "hydra" and folder else names:
            path = name if folder is None else f"{folder}/{name}"
            if folder is None or os.path.exists(path):
                yield path


class _Mpi:
    """An MPI library, initialized. NoExchange: not usable here."""

    def __init__(self, path, engine, size):
        try:
            # Global, as Open MPI's own plugins expect.
            self._library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            version = ctypes.create_string_buffer(_VERSION_MAX)
            self._library.MPI_Get_library_version(version, ctypes.byref(ctypes.c_int()))
        except (OSError, AttributeError) as error:
            raise NoExchange(f"{path}: {error}") from None
        text = version.value.decode(errors="replace")
        open_mpi = "Open MPI" in text
        if _FAMILIES[engine] and open_mpi != (engine == "openmpi"):
            raise NoExchange(f"{path} is {text.split(',')[0].splitlines()[0]}, not the MPI that started this process")
        if open_mpi:
            self.world, self.byte = (ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(self._library, name)))
                                     for name in ("ompi_mpi_comm_world", "ompi_mpi_byte"))
        else:
            self.world, self.byte = ctypes.c_int(_MPICH_COMM_WORLD), ctypes.c_int(_MPICH_BYTE)
        self._initialize()
        found = ctypes.c_int()
        self.call("MPI_Comm_size", self.world, ctypes.byref(found))
        if found.value != size:
            raise NoExchange(f"{path} sees {found.value} ranks, not {size}: it did not start this process")

    def call(self, name, *arguments):
        """Calls a function. NoExchange: it failed."""
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise NoExchange(f"{name} failed with code {code}")

    def _initialize(self):
        flag = ctypes.c_int()
        self.call("MPI_Finalized", ctypes.byref(flag))
        if flag.value:
            raise NoExchange("MPI was finalized before init()")
        self.call("MPI_Initialized", ctypes.byref(flag))
        if not flag.value:
            self.call("MPI_Init_thread", None, None, ctypes.c_int(_THREAD_SERIALIZED), ctypes.byref(ctypes.c_int()))
            atexit.register(self._finalize)

    def _finalize(self):
        # Finalizing waits for all ranks. One that dies of an exception must not: mpirun sees it end, and stops the job.
        if getattr(sys, "last_type", None) is not None:
            return
        flag = ctypes.c_int()
        self.call("MPI_Finalized", ctypes.byref(flag))
        if not flag.value:      # mpi4py, imported later, may have been first
            self.call("MPI_Finalize")


def _load(engine, size):
    if engine not in _loaded:
        reasons = []
        for path in dict.fromkeys(_candidates(engine)):
            try:
                _loaded[engine] = _Mpi(path, engine, size)
                break
            except NoExchange as error:
                reasons.append(str(error))
        else:
            raise NoExchange("no library of the MPI that started this process was found (" + "; ".join(reasons) + ")")
    return _loaded[engine]


class MpiExchange:
    """The broadcast of the job."""

    def __init__(self, engine, size):
        self._mpi = _load(engine, size)

    def _broadcast(self, buffer):
        self._mpi.call("MPI_Bcast", buffer, ctypes.c_int(_MESSAGE_NBYTES), self._mpi.byte, ctypes.c_int(0),
                       self._mpi.world)
        return buffer.value

    def send(self, message):
        """Rank 0: bytes for all others, none of them zero."""
        if len(message) >= _MESSAGE_NBYTES:
            raise NoExchange(f"a message of {len(message)} bytes is too long")
        self._broadcast(ctypes.create_string_buffer(message, _MESSAGE_NBYTES))

    def receive(self, timeout):
        """The others: the bytes. Waits for rank 0 as long as MPI does."""
        return self._broadcast(ctypes.create_string_buffer(_MESSAGE_NBYTES))

    def close(self):
        """Nothing is left to be freed."""
