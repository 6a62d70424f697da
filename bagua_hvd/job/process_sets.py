"""Process sets: subsets of the ranks that run collectives among themselves.

A ProcessSet is a list of ranks that, once registered, also has an id. Registration is collective over all ranks of the
job, members or not; the core assigns ids, equal on all ranks. Shutting the runtime down unregisters every set.
"""
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from bagua_hvd.core import native
from bagua_hvd.core.context import Context
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job.runtime import NOT_INITIALIZED, job_options, runtime
from bagua_hvd.job.runtime import context as running_context
from bagua_hvd.job.runtime import rank as job_rank


class ProcessSet:
    """Some ranks of the job. Unregistered until passed to `init(process_sets=...)` or `add_process_set`.

    Args:
        ranks_or_comm: global ranks, in any order; they are sorted.
    Raises:
        ValueError: an entry is not an int, or an MPI communicator was given (not supported).
    Attributes:
        process_set_id: None before registration. ranks: sorted list. mpi_comm: always None.
        removals: how often remove_process_set() has removed it.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm = None
    removals = 0

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        try:
            ranks = list(ranks_or_comm)
        except TypeError:
            raise ValueError(
                "ProcessSet takes a sequence of ranks; MPI communicators are not supported."
            ) from None
        for rank in ranks:
            if not isinstance(rank, int) or isinstance(rank, bool):
                raise ValueError(f"ProcessSet takes ranks as ints, but got {rank!r}.")
        self.ranks = sorted(ranks)

    def size(self) -> int:
        """Number of ranks in the set, None before registration. ValueError: the id is unknown to the runtime."""
        if self.process_set_id is None:
            return None         # type: ignore[return-value]  # as in Horovod: callers that registered it need no check
        size = running_context(ValueError).process_set_size(self.process_set_id)
        if size < 0:
            raise ValueError(f"{self} is not registered with the runtime.")
        return size

    def rank(self) -> int:
        """This rank's position in the set, None before registration. ValueError: this rank is not a member."""
        if self.process_set_id is None:
            return None         # type: ignore[return-value]
        rank = running_context(ValueError).process_set_rank(self.process_set_id)
        if rank == -1:
            raise ValueError(f"This rank is not a member of {self}.")
        if rank < 0:
            raise ValueError(f"{self} is not registered with the runtime.")
        return rank

    def included(self) -> bool | None:
        """Whether this rank is a member, by `ranks` alone; None if those are not known yet."""
        if self.ranks is None:
            return None
        return job_rank() in self.ranks

    def __str__(self):
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


def id_of(process_set: Any) -> int | None:
    """The set's id; None if it has none. TypeError: not a process set."""
    try:
        return process_set.process_set_id
    except AttributeError:
        raise TypeError(f"a ProcessSet is expected, such as hvd.global_process_set, not {process_set!r:.90}") from None


class _GlobalProcessSet(ProcessSet):
    """All ranks: id 0 always, `ranks` known from init to shutdown."""

    process_set_id = 0

    def __init__(self):
        pass

    def included(self):
        job_rank()          # raises before init
        return True


global_process_set = _GlobalProcessSet()

_lock = threading.Lock()
_registered: dict[int, ProcessSet] = {}     # id -> ProcessSet, without the global one


def check_ranks(ranks: list[int] | None, size: int, known: Sequence[list[int] | None]) -> None:
    """ValueError unless `ranks` can be a new set of a job of `size` ranks, besides the global and the `known` sets."""
    if not ranks:
        raise ValueError("A process set needs at least one rank.")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"A process set holds each rank once, but got {ranks}.")
    if ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"A process set holds ranks from 0 to {size - 1}, but got {ranks}.")
    if ranks == list(range(size)) or ranks in known:
        raise ValueError(f"Attempted to add a duplicate process set: {ranks}.")


def context_and_id(process_set: ProcessSet) -> tuple[Context, int]:
    """The running job's context, and the native id of the set there; see registered_id()."""
    context = runtime.context
    if context is None:
        raise HorovodInternalError(NOT_INITIALIZED)
    # The common case first: a small operation takes only a few microseconds.
    return context, 0 if process_set is global_process_set else registered_id(process_set)


def registered_id(process_set: Any) -> int:
    """The native id of the set. ValueError: it has none, or the running job has no set of that id."""
    id = id_of(process_set)
    if id != 0:
        check_registered(id, process_set)
    return id       # type: ignore[return-value]  # None has raised


def check_registered(id: int | None, what: object) -> None:
    """Raises ValueError about `what` unless this is a process set's id. Before init(), any number may become one."""
    known = id == 0 or id in _registered or id in _of_members
    if id is None or (runtime.context is not None and not known):
        raise ValueError(
            f"{what} is not registered, or has been removed: pass it to init(process_sets=[...]) or "
            "add_process_set() first."
        )


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The sets of the running job, a dict of id -> sorted list of ranks. ValueError before init()."""
    running_context(ValueError)
    with _lock:
        sets = {0: global_process_set, **_registered}
        return {id: list(process_set.ranks or ()) for id, process_set in sets.items()}


def register(context: Any, process_set: ProcessSet, size: int) -> None:
    """Registers `process_set` with `context`; collective over all ranks, which pass the same set.

    `size` is the job's. Raises like add_process_set, but does not require dynamic process sets.
    """
    with _lock:
        known = [registered.ranks or [] for registered in _registered.values()]
    ranks = process_set.ranks or []
    check_ranks(ranks, size, known)
    # One name for all sets, so that ranks that add different ones get an error at once.
    operation = context.post(native.PROCESS_SET_ADD, "process_set.add", splits=ranks, blocking=True)
    operation.wait()
    process_set.process_set_id = operation.value
    with _lock:
        _registered[process_set.process_set_id] = process_set


_of_members: dict[int, ProcessSet] = {}         # by id; sets that only their members requested


_asked: dict[str, Future[int]] = {}             # by the operation's name: the id of the set


def ask_among_members(context: Any, ranks: list[int], speculative: bool = False) -> Future[int]:
    """Requests a set of these ranks (rising); only they call this, and the others take part without noticing.

    speculative: no call waits for it yet, so it is no stall.
    Returns:
        A future of the set's id; an earlier request on this rank for the same ranks shares it.
    """
    name = "process_set.members." + "_".join(map(str, ranks))
    with _lock:
        found = _asked.get(name)
        if found is not None:
            return found
        found = _asked[name] = Future()

    def fail(error):
        with _lock:
            if _asked.get(name) is found:
                del _asked[name]                    # the next call requests it again
        found.set_exception(error)

    def added():
        try:
            operation.wait()
            found.set_result(operation.value)
        except Exception as error:
            fail(error)

    try:
        operation = context.post(native.PROCESS_SET_ADD, name, splits=ranks, root_rank=1 + speculative)
        operation.when_ended(added)
    except Exception as error:
        fail(error)
    return found


def of_members(context: Any, ranks: list[int], size: int) -> ProcessSet:
    """The ProcessSet of these ranks (rising), all of which call this; the other ranks of the job do not.

    Blocks until all have called. The set lives as long as the runtime; remove_process_set() does not remove it. `size`
    is the job's.

    Raises:
        HorovodInternalError: there are too many sets, or a rank was lost.
    """
    if len(ranks) == size:
        return global_process_set
    id = ask_among_members(context, ranks).result()
    with _lock:
        if id not in _of_members:
            _of_members[id] = ProcessSet(ranks)
            _of_members[id].process_set_id = id
        return _of_members[id]


def on_shutdown() -> None:
    """Called by basics at shutdown: unregisters all sets."""
    with _lock:
        for sets in (_registered, _of_members):
            for process_set in sets.values():
                process_set.process_set_id = None
            sets.clear()
        _asked.clear()
    global_process_set.ranks = None


def _check_dynamic(verb):
    if not job_options().dynamic_process_sets:
        raise ValueError(
            f"Process sets can be {verb} after init() only in dynamic mode: call init(process_sets=\"dynamic\"), or "
            "set the environment variable HOROVOD_DYNAMIC_PROCESS_SETS=1."
        )


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers a process set while the job runs. Blocks until all ranks, including non-members, make the same call.

    Args:
        process_set: a ProcessSet or a sequence of global ranks.
    Returns:
        The registered ProcessSet.
    Raises:
        ValueError: not in dynamic mode, before init(), or a set of these ranks exists. Nothing was sent.
        HorovodInternalError: a rank was lost, or the job was shut down.
    """
    context = running_context(ValueError)
    _check_dynamic("added")
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.process_set_id is not None:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}.")
    register(context, process_set, context.process_set_size(0))
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregisters a process set. Blocks until all ranks, including non-members, call it. Its id may be reused.

    Args:
        process_set: a set that add_process_set() or init() registered.
    Returns:
        True; False for the global set, a torch.distributed group's, and a set that is not registered. After True the
        set's `process_set_id` is None.
    Raises:
        ValueError: not in dynamic mode, or before init().
    """
    context = running_context(ValueError)
    _check_dynamic("removed")
    id = id_of(process_set)
    if process_set is global_process_set or id is None or id in _of_members:
        return False
    operation: Any = context.post(native.PROCESS_SET_REMOVE, f"process_set.remove.{id}", root_rank=id, blocking=True)
    operation.wait()
    removed = operation.value == 1
    if removed:
        with _lock:
            _registered.pop(id, None)
        runtime.unnamed.pop(id, None)        # the next set with this id counts anew, its optimizers too
        runtime.optimizers.pop(id, None)
        process_set.process_set_id = None
        process_set.removals += 1
    return removed
