# ruff: noqa: F403, F405  (the facts of the job are found here, too)
"""A process joins and leaves a job: init(), shutdown(), the timeline.

These, and the facts of the running job (job/runtime.py), are the functions that Horovod's scripts find in `hvd`.
"""
import atexit
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from bagua_hvd.core import log, native, objects, variables
from bagua_hvd.core.context import Context, Listener
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.log import logger
from bagua_hvd.job import elastic_worker, environment, join, process_sets, rendezvous, reporting
from bagua_hvd.job.engines import abandon_mpi, detect, start_mpi
from bagua_hvd.job.environment import host_hash
from bagua_hvd.job.process_sets import ProcessSet, global_process_set
from bagua_hvd.job.runtime import *
from bagua_hvd.job.runtime import context, job_options, mpi_enabled, runtime
from bagua_hvd.job.statistics import figures, serve_metrics, statistics, total

# What scripts find in every front end.
__all__ = [
    "Average", "Sum", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set",
    "gloo_built", "gloo_enabled", "init", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "rocm_built", "shutdown", "size", "start_timeline", "statistics",
    "stop_timeline",
]

# Others use this module as `hvd.mpi_ops._basics`, and expect this name there.
_get_process_set_ids_and_ranks = process_sets.get_process_set_ids_and_ranks

# An elastic rendezvous begins when all its members wait for it; a member that does not connect then has been lost.
_RENDEZVOUS_LIMIT_MS = 10_000


def init(comm: Sequence[int] | None = None,
         process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Starts the runtime: connects this process to the other ranks of its job. Does nothing if it already runs with
    these arguments.

    Without launcher variables in the environment the job has one rank.

    Args:
        comm: None, or all ranks of the job; jobs over a subset of the ranks are not supported yet.
        process_sets: a list of ProcessSets to register, the same on all ranks, or "dynamic". In an elastic job, sets
            that do not fit its present size are left out, with a warning.
    Raises:
        ValueError: malformed environment, duplicate or differing process sets, or the ranks did not find each other in
            time ("Horovod initialization failed. ..."); the runtime does not run then. Or it already runs, with other
            arguments.
        RemovedFromJob: an elastic job has no slot for this process any more. A SystemExit with exit code 0.
    """
    with runtime.lock:
        if process_sets is not None and not isinstance(process_sets, str):
            process_sets = [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in process_sets]
        if runtime.context is not None:
            _check_repeated(comm, process_sets)
            runtime.init_repeated = True
            return
        runtime.process_sets = process_sets
        driver = elastic_worker.connect()
        if driver is None:
            _start(comm, process_sets)
            return
        failure = None
        while True:
            assignment = elastic_worker.join_generation(driver, failure)
            try:
                _start(comm, process_sets, assignment.scope)
                context().await_state(assignment.joins)
                return
            except (InitializationFailed, HorovodInternalError) as error:
                failure = str(error)    # most likely a rank was lost meanwhile: the driver arranges another rendezvous
                logger.info("%s", failure)


def _check_repeated(comm, process_sets):
    """ValueError if the running job was started with other arguments; else equal sets become the job's."""
    _check_comm(comm, runtime.options)
    if isinstance(process_sets, str):
        same = process_sets.lower() == "dynamic" and job_options().dynamic_process_sets
    else:
        sets = () if isinstance(runtime.process_sets, str) else runtime.process_sets or ()
        known = {tuple(each.ranks): each for each in sets}
        same = not process_sets or sorted(tuple(each.ranks or ()) for each in process_sets) == sorted(known)
    if not same:
        raise ValueError(f"init(process_sets={process_sets!r}): init() has run already, perhaps by "
                         'init_process_group("bagua"), without these: pass process_sets to the first call.')
    if not isinstance(process_sets, str):
        for each in process_sets or ():
            each.__dict__ = known[tuple(each.ranks)].__dict__       # its id then, and whenever it changes


class InitializationFailed(ValueError):
    """The ranks did not find each other, or could not connect."""


def _start(comm, process_sets, scope=None):
    """As init(). scope: name of the rendezvous; None: derived from the number of init() calls."""
    # Counted before anything can fail: an attempt that fails on one rank counts on all ranks.
    runtime.inits += 1
    runtime.changes += 1
    runtime.init_repeated = False
    options = environment.read_options(_launcher_environment())
    log.configure(options.rank)
    if options.rank == 0 and runtime.inits == 1:
        for sentence in [*variables.without_effect(), *variables.misspelt()]:
            logger.warning("%s", sentence)
    _check_comm(comm, options)
    static_sets = _static_sets(process_sets, options)
    options.scope = scope or getattr(runtime.membership, "scope", None) or f"init.{runtime.inits}"
    if scope:
        # All members are known to be present. If ranks only left, the network has been measured before.
        size, bytes_per_s = runtime.previous
        options.known_bytes_per_s = bytes_per_s if options.size < size else 0
        options.start_timeout_ms = min(options.start_timeout_ms, _RENDEZVOUS_LIMIT_MS)
    if options.transport == "mpi" and options.size > 1:
        _start_mpi()
    try:
        started = Context(options, partial(rendezvous.gather_endpoints, options))
    except HorovodInternalError as error:
        raise InitializationFailed(f"Horovod initialization failed. {error}") from None
    except ValueError as error:
        raise ValueError(f"Horovod initialization failed. {error}") from None
    logger.info("rank %d of %d is in the job (%s): transport %s", options.rank, options.size, options.scope,
                options.transport)
    runtime.restart_numbers()
    if not options.elastic:
        runtime.optimizers, runtime.shared_numbers = {}, None
    runtime.restart_statistics()
    runtime.handles.clear()
    runtime.options = options
    runtime.context = started
    if variables.read(reporting.VARIABLE):
        runtime.reporter = reporting.Reporter(figures, lambda: started.stalled(options.size))
    runtime.listener = Listener(started, lambda: runtime.steps)
    runtime.call_context_callbacks()
    # Registered anew each time: it must run before MPI is finalized, which this call may have started.
    atexit.unregister(shutdown)
    atexit.register(shutdown)
    try:
        if runtime.membership is not None:
            _number_hosts(started, options)
            runtime.membership.connected()
        if options.timeline and options.timeline.upper() != "DYNAMIC":
            started.start_timeline(options.timeline, options.timeline_mark_cycles)
        _register_static_sets(started, static_sets, options)
        serve_metrics()
    except BaseException:
        shutdown()
        raise


def restart() -> None:
    """Leaves the job and joins it again, with the same process sets; rank and size may change."""
    shutdown()
    init(process_sets=runtime.process_sets)


def placed_by_baguarun() -> Any:
    """Whether the environment names the rendezvous: then no other engine is asked."""
    placed = variables.given("HOROVOD_SIZE") or variables.given("HOROVOD_RANK")
    return placed and variables.read("HOROVOD_GLOO_RENDEZVOUS_PORT") != 0


def _launcher_environment():
    """The environment with the variables of baguarun: its own, or those of a job that mpirun, srun or torchrun started.

    Port 0 means that there is no rendezvous although rank and size are set.
    ValueError: the engine's ranks cannot be connected.
    """
    if placed_by_baguarun():
        return os.environ
    if runtime.membership is None or runtime.membership.spent:
        try:
            runtime.membership = join.join(variables.read("HOROVOD_START_TIMEOUT"))
        except RuntimeError as error:
            raise ValueError(f"Horovod initialization failed. {error}") from None
    return os.environ if runtime.membership is None else {**os.environ, **runtime.membership.variables}


def _start_mpi():
    """ValueError: MPI is not usable in this process."""
    placement = detect()
    try:
        if placement is None:
            raise RuntimeError("no mpirun started this process")
        start_mpi(placement)
    except RuntimeError as error:
        raise ValueError(f"Horovod initialization failed. BAGUA_HVD_TRANSPORT=mpi: {error}; start the job by mpirun, "
                         "srun or `baguarun --mpi`, or leave BAGUA_HVD_TRANSPORT out.") from error


def _leave_mpi(stopped):
    """Called before a context that uses MPI stops: no rank may wait in MPI for a lost rank."""
    try:
        stopped.check()
    except HorovodInternalError as error:
        if error.status != native.ERR_SHUTDOWN:
            abandon_mpi()


def _number_hosts(started, options):
    """Sets local and cross ranks from the host hashes of all ranks: engines differ in the variables they set."""
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
    if hasattr(comm, "Get_rank"):
        if (comm.Get_rank(), comm.Get_size()) != (options.rank, options.size):
            raise ValueError(f"init(comm=...): this process is rank {comm.Get_rank()} of {comm.Get_size()} in the "
                             f"communicator, but rank {options.rank} of {options.size} in the job: leave out comm")
        return
    if not isinstance(comm, (list, tuple, range)):
        raise ValueError(f"init(comm={comm!r}) takes a list of ranks, or an MPI communicator of the whole job.")
    if sorted(comm) != list(range(options.size)):
        raise ValueError(
            f"init(comm={list(comm)}): a job over a subset of its {options.size} ranks is not supported; register the "
            "subset with init(process_sets=[hvd.ProcessSet(ranks)]) and pass it as process_set=."
        )


def _static_sets(sets, options):
    """The sets to register, after all checks that one rank can make before anything is sent."""
    if sets is None:
        return []
    if isinstance(sets, str):
        if sets.lower() != "dynamic":
            raise ValueError(f'init(process_sets={sets!r}): expected a list of ProcessSets or "dynamic".')
        options.dynamic_process_sets = True
        return []
    static_sets = _fitting(sets, options) if options.elastic else sets
    for i, process_set in enumerate(static_sets):
        process_sets.check_ranks(process_set.ranks, options.size, [other.ranks for other in static_sets[:i]])
    return static_sets


def _fitting(sets, options):
    """The sets that an elastic job of the present size can hold; the others stay unregistered until it can."""
    fitting = []
    for process_set in sets:
        ranks = process_set.ranks
        if ranks and (ranks[-1] >= options.size or ranks == list(range(options.size))):
            if options.rank == 0:
                logger.warning("%s is not registered while the job has %d ranks", process_set, options.size)
        else:
            fitting.append(process_set)
    return fitting


def _register_static_sets(started, static_sets, options):
    """Checks that all ranks passed the same list, then registers it: ids 1, 2, ... in list order."""
    global_process_set.ranks = list(range(options.size))
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


def shutdown() -> None:
    """Stops the runtime. Operations in flight fail here and on the other ranks. init() may be called again.

    First waits for gradients that are one step late (delay=1): other ranks may need this one to receive them.
    """
    for sent in list(runtime.in_flight):
        sent.wait_all()
    with runtime.lock:
        stopped = runtime.context
        if stopped is None:
            return
        reporting.report_cause(stopped.first_loss().rank)    # before this rank leaves, too
        logger.debug("leaving the job, after %s", total())
        if mpi_enabled():
            _leave_mpi(stopped)
        if runtime.reporter is not None:
            runtime.reporter.close()
            runtime.reporter = None
        runtime.previous = runtime.options.size, int(stopped.network().bytes_per_s)
        runtime.context = None
        runtime.options = None
        process_sets.on_shutdown()
        runtime.restart_numbers()
        # Not destroyed here: other threads may be waiting in it. Its last reference destroys it.
        stopped.shutdown()
        runtime.listener.close()
        runtime.call_context_callbacks()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts the timeline, or redirects it to another file. Call it on all ranks; rank 0 writes.

    Args:
        file_path: a Chrome trace (JSON), valid after every event. Does nothing if this file is being written already.
        mark_cycles: adds CYCLE_START marks when the coordinator responds.
    Raises:
        ValueError: before init(), or without HOROVOD_TIMELINE in the environment (DYNAMIC: no timeline at the start).
        HorovodInternalError: the file cannot be written.
    """
    options = job_options()
    if options.timeline is None:
        raise ValueError(
            "start_timeline() needs the environment variable HOROVOD_TIMELINE when the job starts: set it to DYNAMIC, "
            "or to the file of a timeline from the beginning."
        )
    context().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Ends the timeline and completes its file. Does nothing if there is none. ValueError before init()."""
    job_options()
    context().stop_timeline()


def _after_fork_in_child():
    runtime.lock = threading.RLock()
    forked = runtime.context
    if forked is not None:
        forked.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


