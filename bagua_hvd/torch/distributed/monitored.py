"""A barrier that names missing ranks. It uses the store, which works even when nothing else does."""
import time
from datetime import timedelta
from typing import Any


def barrier(store: Any, rank: int, size: int, seconds: float, wait_all_ranks: Any) -> None:
    """Blocks until rank 0 has seen all ranks, and each other rank has seen the reply of rank 0.

    Args:
        store: for this barrier only. seconds: timeout of the whole barrier.
        wait_all_ranks: rank 0 names all missing ranks, not only the first.
    Raises:
        RuntimeError: a rank did not arrive in time; the messages are c10d's.
    """
    deadline = time.monotonic() + seconds
    milliseconds = round(seconds * 1000)
    if rank:
        store.set(str(rank), "here")
        if not _seen(store, "all", deadline):
            raise RuntimeError(f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
                               "for send/recv from rank 0. Please check rank 0 logs for faulty rank. (waited "
                               f"{milliseconds} ms)")
        return
    missing = []
    for other in range(1, size):
        if not _seen(store, str(other), deadline):
            missing.append(other)
            if not wait_all_ranks:
                break
    if missing:
        named = ", ".join(map(str, missing))
        ranks = "Ranks" if len(missing) > 1 else "Rank"
        raise RuntimeError(f"[Rank 0]: {ranks} {named} failed to pass monitoredBarrier in {milliseconds} ms")
    store.set("all", "here")


def _seen(store, key, deadline):
    left = max(deadline - time.monotonic(), 0.01)
    try:
        store.wait([key], timedelta(seconds=left))
    except RuntimeError:
        return False
    return True
