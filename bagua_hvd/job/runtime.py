"""The running job: one native context of this process, made by init() and shared by all front ends; and its facts.

Facts of the job (rank, size, ...) are stored in Python, so reading them costs nothing and works in forked children,
where the context does not work. So are, at the end, those of this build, which are the same in any job.
"""
import collections
import enum
import itertools
import threading
import time
from typing import Any

from bagua_hvd.core import device, native
from bagua_hvd.core.context import Context
from bagua_hvd.core.exceptions import HorovodInternalError


class ReduceOp(enum.IntEnum):
    """Reductions of values of several ranks; equal to the integers that Horovod's scripts compare with."""

    Average = native.OP_AVERAGE
    Sum = native.OP_SUM
    Adasum = native.OP_ADASUM
    Min = native.OP_MIN
    Max = native.OP_MAX
    Product = native.OP_PRODUCT

    __str__ = int.__repr__      # as from Python 3.11 on: messages of the core contain the number


Average, Sum, Adasum, Min, Max, Product = ReduceOp

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
_MPI_THREAD_MULTIPLE = 3        # of bhvd_mpi_threads


class _Runtime:
    """The state between init() and shutdown(). Otherwise `context` and `options` are None."""

    def __init__(self):
        self.lock = threading.RLock()
        self.context = None
        self.options: Any = None
        self.previous = 0, 0                    # size and measured bytes per second of the previous job
        self.optimizers: dict[int, int] = {}    # by process set, the number of its next one: reduction/agreement.py
        self.shared_numbers: dict[Any, list] | None = None  # after share_numbers() there
        self.init_repeated = False              # then a process group that started the runtime does not stop it
        self.inits = 0                          # names the rendezvous of a job that is not elastic
        self.changes = 0                        # calls of init() and join(): ranks must exchange their facts anew
        self.in_flight: set[Any] = set()        # see track()
        self.process_sets: Any = None                # as passed to init(), for restart()
        self.restart_numbers()
        self.reporter: Any = None                    # reports to baguarun --dashboard
        self.listener: Any = None                    # logs the core's messages
        self.steps = 0                          # of all optimizers, in all jobs of this process
        self.metrics_server: Any = None              # Prometheus server, once it was requested
        self.restart_statistics()
        self.membership: Any = None                  # in a job started by another engine than baguarun
        self.handles = {}                       # int handle -> collectives.Pending
        self._context_callbacks = []

    def restart_numbers(self):
        self.handle_numbers = itertools.count(1)
        # For each process set: see collectives.
        self.unnamed: dict[int, Any] = collections.defaultdict(lambda: itertools.count(1))

    def restart_statistics(self):
        self.started = time.monotonic()
        self.algorithms = {}                    # class name -> AlgorithmStatistics: see job/statistics.py
        self.last_statistics = None
        self.plans: dict[str, dict[str, Any]] = {}      # by the model's name: see tuning/tuner.py

    def track(self, sent: Any) -> None:
        """Registers data in flight that needs this rank: sent.wait_all() is called before this rank leaves or joins.

        Data that has arrived, sent.finished(), needs no rank. Such entries, whose optimizers may be gone, are dropped.
        """
        self.in_flight = {sent, *(earlier for earlier in self.in_flight if not earlier.finished())}

    def on_context_change(self, callback):
        """Calls callback(context, options) now and after every init(), and with (None, None) after every shutdown().

        For front ends that store the native context outside Python.
        """
        with self.lock:
            self._context_callbacks.append(callback)
            callback(self.context, self.options)

    def call_context_callbacks(self):
        for callback in self._context_callbacks:
            callback(self.context, self.options)


runtime = _Runtime()


def context(exception: type[Exception] = HorovodInternalError) -> Context:
    """The runtime's native context; raises `exception` before init()."""
    current = runtime.context
    if current is None:
        raise exception(NOT_INITIALIZED)
    return current


def job_options() -> Any:
    """The Options of the running job; ValueError before init()."""
    options = runtime.options
    if options is None:
        raise ValueError(NOT_INITIALIZED)
    return options


def is_initialized() -> bool:
    """Whether the runtime is running."""
    return runtime.context is not None


def rank() -> int:
    """This process's number in the job, from 0. ValueError before init()."""
    return job_options().rank


def size() -> int:
    """Number of ranks in the job. ValueError before init()."""
    return job_options().size


def local_rank() -> int:
    """This process's number on its host, from 0. ValueError before init()."""
    return job_options().local_rank


def local_size() -> int:
    """Number of ranks on this host. ValueError before init()."""
    return job_options().local_size


def cross_rank() -> int:
    """Index of this host among those that have this local rank. ValueError before init()."""
    return job_options().cross_rank


def cross_size() -> int:
    """Number of hosts that have this local rank. ValueError before init()."""
    return job_options().cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks, as far as this rank can tell. ValueError before init()."""
    options = job_options()
    return options.local_size * options.cross_size == options.size


def mpi_enabled() -> bool:
    """Whether the running job has several ranks and uses MPI between hosts: BAGUA_HVD_TRANSPORT=mpi."""
    options = runtime.options
    return options is not None and options.transport == "mpi" and options.size > 1


def mpi_threads_supported() -> bool:
    """Whether MPI was initialized with MPI_THREAD_MULTIPLE, so that the script may use it beside bagua_hvd.

    ValueError: before init(), or the job does not use MPI.
    """
    job_options()
    if not mpi_enabled():
        raise ValueError("Horovod MPI is not enabled; BAGUA_HVD_TRANSPORT=mpi makes a job of mpirun use it.")
    return bool(native.lib.bhvd_mpi_threads() == _MPI_THREAD_MULTIPLE)


def gloo_enabled() -> bool:
    """True: bagua_hvd's own transports replace gloo."""
    return True


def wait_for_gpus() -> None:
    """Waits until the GPUs have finished the work of ended operations, and raises if it failed.

    Operations on GPUs end when their work is enqueued. Call this before you keep weights that depend on them, as in a
    checkpoint; elastic states do so when they save. Without tensors on GPUs it does nothing.

    Raises:
        HorovodInternalError: a rank was lost, or a GPU failed; results of operations since the last such call are
            undefined.
    """
    current = runtime.context
    if current is not None:
        current.wait_for_gpus()


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
