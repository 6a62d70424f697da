"""A c10d process group over the core's collectives. Method names and arguments are c10d's.

All groups share the job's one context: a group of all ranks is the global process set, others are process sets that
only their members register. Operations match by name, which contains the group and the number of its operations so far.
So the ranks of a group must call in the same order, as c10d requires; groups may overlap and interleave freely.

Rows: the core gets gathered or reduced data as one row per rank, and all rows must have the same length and dtype. So
ranks that disagree get both shapes in the error, and results go directly to the caller's tensors. Where sizes may
differ (alltoall, gather, scatter), the core allocates the results.
"""
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bagua_hvd.core import native, variables
from bagua_hvd.job import basics
from bagua_hvd.job.join import default_group, join_group
from bagua_hvd.job.process_sets import ProcessSet, of_members
from bagua_hvd.torch.distributed.operations import Operations, Tensors, copying, dense, movable
from bagua_hvd.torch.distributed.options import Options
from bagua_hvd.torch.distributed.works import CombinedWork, Work

_lock = threading.Lock()


def start(store: Any, rank: int, size: int, seconds: float) -> Any:
    """Ensures that the runtime runs, with this rank and size. Collective over the default group.

    Args:
        store: of the group. seconds: timeout for the ranks to find each other.
    Returns:
        The number of this init() for stop(), or None if the runtime was already running.
    Raises:
        ValueError: it runs with another rank or size, or the ranks did not find each other.
    """
    with _lock:
        if basics.is_initialized():
            _check(rank, size)
            return None
        if not basics.placed_by_baguarun():
            membership = join_group(store, rank, size, seconds)
            if not variables.given("HOROVOD_START_TIMEOUT"):
                membership.variables["HOROVOD_START_TIMEOUT"] = f"{seconds:g}"
            basics.runtime.membership = membership
        basics.init()
        _check(rank, size)
        return basics.runtime.inits


def _check(rank, size):
    if (basics.rank(), basics.size()) != (rank, size):
        raise ValueError(
            f"this process is rank {rank} of {size} to torch.distributed, but rank {basics.rank()} of {basics.size()} "
            "to bagua_hvd: start both by the same launcher, or call init_process_group() before hvd.init()"
        )


def stop(number: int | None) -> None:
    """Shuts down the runtime if it still runs since this start(), and the user has not called hvd.init(), too."""
    with _lock:
        if number == basics.runtime.inits and basics.is_initialized() and not basics.runtime.init_repeated:
            basics.shutdown()


def process_set_of(group: Any = None) -> ProcessSet:
    """The ProcessSet of a torch.distributed group's ranks, on any backend; collective over the group.

    Starts the runtime if it is not running; then it is collective over all ranks.

    Args:
        group: a torch.distributed group; None: the default one.
    Raises:
        ValueError: there is no process group yet, or the ranks of torch.distributed are not those of bagua_hvd.
    """
    default = default_group()
    if default is None:
        raise ValueError("process_set_of() is for groups of torch.distributed: call init_process_group() first")
    _, rank, size = default
    if not basics.is_initialized():
        basics.init()
    _check(rank, size)
    ranks = sorted(dist.get_process_group_ranks(group or dist.group.WORLD))
    return of_members(basics.context(), ranks, size)


def create(backend_options: Any, options: Any) -> Any:
    """Makes a new group; torch calls it on the group's members."""
    ranks = list(backend_options.global_ranks_in_group)
    rank, size = backend_options.group_rank, backend_options.group_size
    store, timeout = backend_options.store, backend_options.timeout
    if ranks and not basics.is_initialized():
        if dist.get_world_size() != len(ranks):
            raise ValueError('the first group of backend "bagua" must have all ranks: call '
                             'init_process_group("bagua"), or hvd.init() on every rank before new_group()')
        ranks = []
    started = None if ranks else start(store, rank, size, timeout.total_seconds())
    try:
        return ProcessGroup(store, rank, ranks or list(range(size)), timeout, options, started)
    except BaseException:
        stop(started)
        raise


class ProcessGroup(Operations):
    """Some ranks of the job; see Group."""

    # ------------------------------------------------------------------------------------------- properties ----

    def getBackendName(self) -> str:
        return "bagua"

    name = _get_backend_name = getBackendName

    # C++ calls these; without them it looks for a backend in C++.
    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupDesc(self, text: str) -> None:
        self._group_desc = text

    def getGroupDesc(self) -> str:
        return self._group_desc

    _group_name = _group_desc = ""

    @property
    def process_set(self) -> ProcessSet:
        """The ProcessSet of its ranks, for bagua_hvd's own collectives."""
        return self._set

    @property
    def supports_splitting(self) -> bool:
        return True

    def _set_sequence_number_for_group(self):
        """Does nothing: the group counts from the beginning."""

    def _get_sequence_number_for_group(self):
        return self._number + 1

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    set_timeout = _set_default_timeout

    def shutdown(self) -> None:
        stop(self._started)

    def abort(self) -> None:
        """If this group started the runtime, ends operations in flight on all ranks, as a lost rank would."""
        self.shutdown()

    def _start_coalescing(self, device):
        """Operations from here to _end_coalescing() run separately, but c10d waits for all of them at once."""
        if other := self._other_on(device):
            other._start_coalescing(device)
        else:
            self._coalesced = []

    def _end_coalescing(self, device):
        if other := self._other_on(device):
            return other._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return self._work(CombinedWork(works), [tensor for work in works for tensor in work.result()],
                          "coalesced operations")

    def split_group(self, ranks: list[int], timeout: timedelta | None = None, opts: Options | None = None,
                    group_name: str | None = None, group_desc: str | None = None,
                    device_types: Any = None) -> dist.ProcessGroup | None:
        """Makes a group of some of this group's ranks, given by their numbers here; each of these must call it.

        Returns None on other ranks.
        """
        if self._rank not in ranks:
            return None
        name = group_name or "split." + "_".join(map(str, ranks))
        store = dist.PrefixStore(name, self._store)
        timeout = timeout or timedelta(seconds=self._timeout)
        group = ProcessGroup(store, ranks.index(self._rank), [self._ranks[rank] for rank in ranks], timeout,
                             opts or self.options)
        group._set_group_name(name)
        group._set_group_desc(group_desc or name)
        return group

    # --------------------------------------------------------------------------------- messages and barriers ----

    def send(self, given: Tensors, rank: int, tag: int = 0) -> Work:
        tensor = dense(self._one(given, "send"))
        operation = self._point_to_point.send(movable(tensor), rank, tag)
        return self._work(operation, given, f"send to rank {rank} with tag {tag}")

    def recv(self, given: Tensors, rank: int, tag: int = 0) -> Work:
        return self._receive(given, self._point_to_point.receive, f"recv from rank {rank} with tag {tag}", rank, tag)

    def recv_anysource(self, given: Tensors, tag: int = 0) -> Work:
        return self._receive(given, self._point_to_point.receive_any, f"recv from any rank with tag {tag}", tag)

    def _receive(self, given, receive, what, *arguments):
        tensor = self._one(given, "recv")
        result = dense(tensor)
        message = receive(movable(result), *arguments)
        work = self._work(message, given, what, None, message.take, source=lambda: message.source)
        return work.then(copying([tensor], [result]), given)

    def barrier(self, opts: Any = None) -> Work:
        name, what = self._begin("barrier")
        operation = self._post(native.BARRIER, name, opts=opts)
        return self._work(operation, [], what, opts)
