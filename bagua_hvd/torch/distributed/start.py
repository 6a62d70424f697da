"""The runtime under a process group, started by the group's store if the user has not called hvd.init()."""
import threading
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.job import basics, process_sets
from bagua_hvd.job.join import default_group, join_group

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


def process_set_of(group: Any = None) -> process_sets.ProcessSet:
    """The ProcessSet of a torch.distributed group's ranks, on any backend; collective over the group.

    Starts the runtime if it is not running; then it is collective over all ranks.

    Args:
        group: a torch.distributed group; None: the default one.
    Raises:
        ValueError: there is no process group yet, or the ranks of torch.distributed are not those of bagua_hvd.
    """
    from torch import distributed

    default = default_group()
    if default is None:
        raise ValueError("process_set_of() is for groups of torch.distributed: call init_process_group() first")
    _, rank, size = default
    if not basics.is_initialized():
        basics.init()
    _check(rank, size)
    ranks = sorted(distributed.get_process_group_ranks(group or distributed.group.WORLD))
    return process_sets.of_members(basics.context(), ranks, size)
