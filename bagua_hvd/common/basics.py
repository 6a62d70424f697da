"""The runtime of this process: one native context, made by init() and shared by every front end.

Facts of the job (rank, size, ...) are kept here, so that asking for them costs nothing and works in forked children,
whose context does not.
"""
import atexit
import collections
import itertools
import os
import threading
import warnings

from bagua_hvd.common import elastic_worker, environment, late, native, objects, process_sets, reporting
from bagua_hvd.common.context import Context
from bagua_hvd.common.exceptions import HorovodInternalError

# Horovod's reduction constants.
Average = native.OP_AVERAGE
Sum = native.OP_SUM
Adasum = native.OP_ADASUM
Min = native.OP_MIN
Max = native.OP_MAX
Product = native.OP_PRODUCT

# A meeting of an elastic job begins when all its members wait for it; who is not there then has been lost.
_MEETING_LIMIT_MS = 10_000

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class _Runtime:
    """The state between init() and shutdown(). `context` and `options` are None outside."""

    def __init__(self):
        self.lock = threading.RLock()
        self.context = None
        self.options = None
        self.inits = 0                          # names the meeting of a job that is not elastic
        self.joins = 0                          # calls of join(); the same on all ranks, but within one
        self.process_sets = None                # as given to init(): restart() gives it again
        self.restart_numbers()
        self.reporter = None                    # reports to baguarun --dashboard
        self.late = None                        # reports when other ranks wait for this one
        self.steps = 0                          # of all optimizers
        self.membership = None                  # in a job that another engine than baguarun started
        self.handles = {}                       # int handle -> collectives.Pending
        self._watchers = []

    def restart_numbers(self):
        self.handle_numbers = itertools.count(1)
        self.unnamed = collections.defaultdict(lambda: itertools.count(1))  # of each process set: see collectives

    def watch(self, watcher):
        """Calls watcher(context, options) now, after every init(), and with (None, None) after every shutdown().

        For front ends that keep the native context where Python does not look.
        """
        with self.lock:
            self._watchers.append(watcher)
            watcher(self.context, self.options)

    def tell_watchers(self):
        for watcher in self._watchers:
            watcher(self.context, self.options)


runtime = _Runtime()


def context(exception=HorovodInternalError):
    """The native context of the runtime; raises `exception` before init()."""
    current = runtime.context
    if current is None:
        raise exception(NOT_INITIALIZED)
    return current


def _options():
    options = runtime.options
    if options is None:
        raise ValueError(NOT_INITIALIZED)
    return options


def dynamic_process_sets():
    """Whether process sets may be added and removed after init()."""
    return _options().dynamic_process_sets


def init(comm=None, process_sets=None):
    """Starts the runtime: connects this process to the other ranks of its job. Does nothing when it is running.

    Without launcher variables in the environment the job has one rank.

    Args:
        comm: None, or all ranks of the job; jobs over a subset of the ranks are not supported yet.
        process_sets: a list of ProcessSets to register, the same on all ranks, or "dynamic". In an elastic job, sets
            that do not fit its present size are left out, with a warning.
    Raises:
        ValueError: malformed environment, duplicate or disagreeing process sets, or the ranks did not find each other
            in time ("Horovod initialization failed. ..."). The runtime is then not running.
        RemovedFromJob: an elastic job has no slot for this process any more. A SystemExit: the process ends with 0.
    """
    with runtime.lock:
        if runtime.context is not None:
            return
        runtime.process_sets = process_sets
        driver = elastic_worker.connect()
        if driver is None:
            _start(comm, process_sets)
            return
        failure = None
        while True:
            scope = elastic_worker.take_place(driver, failure)
            try:
                _start(comm, process_sets, scope)
                return
            except (_MeetingFailed, HorovodInternalError) as error:
                failure = str(error)    # somebody was lost meanwhile, most likely: the driver arranges another meeting


class _MeetingFailed(ValueError):
    """The ranks did not find each other, or could not connect."""


def _start(comm, process_sets, scope=None):
    """As init(). scope: names the meeting; None: by the number of inits."""
    # Counted before anything can fail: an attempt that fails on one rank only is an attempt on all.
    runtime.inits += 1
    options = environment.read_options(_launcher_environment())
    _check_comm(comm, options)
    static_sets = _static_sets(process_sets, options)
    options.scope = scope or f"init.{runtime.inits}"
    if scope:
        # All members are known to be there.
        options.start_timeout_ms = min(options.start_timeout_ms, _MEETING_LIMIT_MS)
    if options.transport == "mpi" and options.size > 1:
        _start_mpi()
    try:
        started = Context(options)
    except HorovodInternalError as error:
        raise _MeetingFailed(f"Horovod initialization failed. {error}") from error
    except ValueError as error:
        raise ValueError(f"Horovod initialization failed. {error}") from error
    runtime.restart_numbers()
    runtime.handles.clear()
    runtime.options = options
    runtime.context = started
    runtime.reporter = reporting.start(_facts)
    if options.size > 1 and options.stall_warning_ms:
        runtime.late = late.Watch(started, options.rank, lambda: runtime.steps)
    runtime.tell_watchers()
    # Again each time: it must run before the end of MPI, which this call may have started.
    atexit.unregister(shutdown)
    atexit.register(shutdown)
    try:
        if runtime.membership is not None:
            _number_hosts(started, options)
            runtime.membership.met()
        if options.timeline and options.timeline.upper() != "DYNAMIC":
            started.start_timeline(options.timeline, options.timeline_mark_cycles)
        _register_static_sets(started, static_sets, options)
    except BaseException:
        shutdown()
        raise


def restart():
    """Leaves the job and enters it again, with the same process sets; rank and size may then be others."""
    shutdown()
    init(process_sets=runtime.process_sets)


def _facts():
    """For reports: sums since init()."""
    counters = runtime.context.counters()
    return {"steps": runtime.steps, "bytes": counters.payload_bytes_sent, "blocked_ns": counters.blocked_ns,
            "operations": counters.operations}


def _launcher_environment():
    """The environment with the variables of baguarun: its own, or those of a job that mpirun, srun or torchrun started.

    Port 0 says that nobody holds a rendezvous, though rank and size are there.
    ValueError: the engine's ranks cannot be brought together.
    """
    placed = "HOROVOD_SIZE" in os.environ or "HOROVOD_RANK" in os.environ
    if placed and os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT") != "0":
        return os.environ
    if runtime.membership is None:
        from bagua_hvd.runner.engines import join  # late: most jobs have no need of it

        try:
            runtime.membership = join.join(environment.start_timeout_ms(os.environ) / 1000)
        except RuntimeError as error:
            raise ValueError(f"Horovod initialization failed. {error}") from error
    return os.environ if runtime.membership is None else {**os.environ, **runtime.membership.variables}


def _start_mpi():
    """ValueError: MPI is not usable in this process."""
    from bagua_hvd.runner.engines import mpi_library
    from bagua_hvd.runner.engines.detect import detect

    placement = detect()
    try:
        if placement is None:
            raise RuntimeError("no mpirun started this process")
        mpi_library.start(placement)
    except RuntimeError as error:
        raise ValueError(f"Horovod initialization failed. BAGUA_HVD_TRANSPORT=mpi: {error}; start the job by mpirun, "
                         "srun or `baguarun --mpi`, or leave BAGUA_HVD_TRANSPORT out.") from error


def _leave_mpi(stopped):
    """Before a context that uses MPI stops: nobody may wait in MPI for a rank that was lost."""
    from bagua_hvd.runner.engines import mpi_library

    try:
        stopped.check()
    except HorovodInternalError as error:
        if error.status != native.ERR_SHUTDOWN:
            mpi_library.abandon()


def _number_hosts(started, options):
    """Local and cross ranks from what every rank says about its host: engines differ in what they tell."""
    from bagua_hvd.runner.common.util.host_hash import host_hash

    hosts = objects.allgather_object(started, host_hash(), "init.hosts") if options.size > 1 else [host_hash()]
    mine = hosts[options.rank]
    options.local_rank = hosts[:options.rank].count(mine)
    options.local_size = hosts.count(mine)
    # As baguarun counts: among the hosts that have this local rank, in the order of their first ranks.
    having = [host for host in dict.fromkeys(hosts) if hosts.count(host) > options.local_rank]
    options.cross_rank, options.cross_size = having.index(mine), len(having)


def _check_comm(comm, options):
    if comm is None:
        return
    if not isinstance(comm, (list, tuple, range)):
        raise ValueError("init(comm=...) takes a list of ranks, not an MPI communicator.")
    if sorted(comm) != list(range(options.size)):
        raise ValueError(
            f"init(comm={list(comm)}): a job over a subset of its {options.size} ranks is not supported; register the "
            "subset with init(process_sets=[hvd.ProcessSet(ranks)]) and pass it as process_set=."
        )


def _static_sets(sets, options):
    """The sets to register, checked as far as one rank can, before anything is sent."""
    if sets is None:
        return []
    if isinstance(sets, str):
        if sets.lower() != "dynamic":
            raise ValueError(f'init(process_sets={sets!r}): expected a list of ProcessSets or "dynamic".')
        options.dynamic_process_sets = True
        return []
    set_class = process_sets.ProcessSet
    static_sets = [item if isinstance(item, set_class) else set_class(item) for item in sets]
    if options.elastic:
        static_sets = _fitting(static_sets, options)
    for i, process_set in enumerate(static_sets):
        process_sets.check_ranks(process_set.ranks, options.size, [other.ranks for other in static_sets[:i]])
    return static_sets


def _fitting(sets, options):
    """Those that an elastic job of the present size can hold; the others stay unregistered until it can."""
    fitting = []
    for process_set in sets:
        ranks = process_set.ranks
        if ranks and (ranks[-1] >= options.size or ranks == list(range(options.size))):
            if options.rank == 0:
                warnings.warn(f"{process_set} is not registered while the job has {options.size} ranks", stacklevel=4)
        else:
            fitting.append(process_set)
    return fitting


def _register_static_sets(started, static_sets, options):
    """Checks that all ranks gave the same list, then registers it: ids 1, 2, ... in its order."""
    process_sets.on_init(options.size)
    if options.size > 1:
        mine = [process_set.ranks for process_set in static_sets]
        for rank, theirs in enumerate(objects.allgather_object(started, mine, "init.process_sets")):
            if theirs != mine:
                raise ValueError(
                    f"Horovod initialization failed. Rank {options.rank} called init() with the process sets {mine}, "
                    f"but rank {rank} with {theirs}."
                )
    for process_set in static_sets:
        process_sets.register(started, process_set, options.size)


def shutdown():
    """Stops the runtime. Operations in flight fail here and on the other ranks. init() may be called again."""
    with runtime.lock:
        stopped = runtime.context
        if stopped is None:
            return
        if mpi_enabled():
            _leave_mpi(stopped)
        if runtime.reporter is not None:
            runtime.reporter.close()
            runtime.reporter = None
        runtime.context = None
        runtime.options = None
        process_sets.on_shutdown()
        runtime.restart_numbers()
        # Not destroyed here: other threads may be waiting in it. The last reference does that.
        stopped.shutdown()
        if runtime.late is not None:
            runtime.late.close()
            runtime.late = None
        runtime.tell_watchers()


def start_timeline(file_path, mark_cycles=False):
    """Begins the timeline, or redirects it to another file. To be called on all ranks; rank 0 writes.

    Args:
        file_path: a Chrome trace (JSON), valid after every event. The file that is being written: nothing happens.
        mark_cycles: adds CYCLE_START marks where the coordinator answers.
    Raises:
        ValueError: before init(), or without HOROVOD_TIMELINE in the environment (DYNAMIC: none yet at the start).
        HorovodInternalError: the file cannot be written.
    """
    options = _options()
    if options.timeline is None:
        raise ValueError(
            "start_timeline() needs the environment variable HOROVOD_TIMELINE when the job starts: set it to DYNAMIC, "
            "or to the file of a timeline from the beginning."
        )
    context().start_timeline(file_path, mark_cycles)


def stop_timeline():
    """Ends the timeline; the file is complete. Does nothing when there is none. ValueError before init()."""
    _options()
    context().stop_timeline()


def _after_fork_in_child():
    runtime.lock = threading.RLock()
    forked = runtime.context
    if forked is not None:
        forked.after_fork()
        runtime.late = None                     # its thread did not come along


os.register_at_fork(after_in_child=_after_fork_in_child)


def is_initialized():
    """Whether the runtime is up."""
    return runtime.context is not None


def rank():
    """This process's number in the job, from 0. ValueError before init()."""
    return _options().rank


def size():
    """Number of ranks in the job. ValueError before init()."""
    return _options().size


def local_rank():
    """This process's number on its host, from 0. ValueError before init()."""
    return _options().local_rank


def local_size():
    """Number of ranks on this host. ValueError before init()."""
    return _options().local_size


def cross_rank():
    """Index of this host among those that have this local rank. ValueError before init()."""
    return _options().cross_rank


def cross_size():
    """Number of hosts that have this local rank. ValueError before init()."""
    return _options().cross_size


def is_homogeneous():
    """Whether every host has the same number of ranks, as far as this rank's numbers tell. ValueError before init()."""
    options = _options()
    return options.local_size * options.cross_size == options.size


def mpi_threads_supported():
    """Whether MPI was initialized with MPI_THREAD_MULTIPLE, so that the script may use it beside bagua_hvd.

    ValueError: before init(), or the job does not use MPI.
    """
    _options()
    if not mpi_enabled():
        raise ValueError("Horovod MPI is not enabled; BAGUA_HVD_TRANSPORT=mpi makes a job of mpirun use it.")
    return native.mpi_threads() == native.MPI_THREAD_MULTIPLE


def mpi_enabled():
    """Whether the running job moves data between hosts by MPI: BAGUA_HVD_TRANSPORT=mpi, and several ranks."""
    options = runtime.options
    return options is not None and options.transport == "mpi" and options.size > 1


def mpi_built():
    """True: every build can use an MPI, which is found at run time."""
    return True


def gloo_enabled():
    """True: bagua_hvd's own transports take gloo's place. ValueError before init()."""
    _options()
    return True


def gloo_built():
    """True: bagua_hvd's own transports take gloo's place."""
    return True


def wait_for_gpus():
    """Waits until the GPUs have done what ended operations put on them, and so tells whether their results are good.

    Operations on GPUs end when their work is enqueued. To be called before weights are kept that came of them, in a
    checkpoint say; elastic states do so when they save. Without tensors on GPUs it does nothing.

    Raises:
        HorovodInternalError: a rank was lost, or a GPU failed; what operations since the last such call wrote is
            undefined.
    """
    current = runtime.context
    if current is not None:
        current.wait_for_gpus()


def nccl_built():
    """NCCL's version, as 22105 for 2.21.5, where it can be loaded and is wanted (BAGUA_HVD_NCCL); else 0."""
    from bagua_hvd.common import device  # late: it needs the native extension

    return device.nccl_facts()[0] if device.nccl_is_wanted() else 0


def ddl_built():
    """False."""
    return False


def ccl_built():
    """False."""
    return False


def cuda_built():
    """True: every build serves tensors on NVIDIA's GPUs; the driver is found at run time."""
    return True


def rocm_built():
    """False."""
    return False
