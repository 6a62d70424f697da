"""Joins the ranks of a torch.distributed group that exists already: they meet by its store.

What the environment says does not matter then: a group may have been made by file://, by Ray, by a notebook.
"""
import sys
from typing import Any

from bagua_hvd.job.engines.detect import Placement
from bagua_hvd.job.engines.exchange_store import StoreMessage, attempt
from bagua_hvd.job.host_hash import host_hash


def default_group() -> Any:
    """(store, rank, size) of torch.distributed's default group; None: this process has none. Imports nothing."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store(), distributed.get_rank(), distributed.get_world_size()


def meet(store: Any, rank: int, size: int, timeout: float) -> Any:
    """(Placement, exchange) for a Membership, collective over the ranks that share the store.

    Raises:
        RuntimeError: a rank did not come within `timeout` seconds.
    """
    store = attempt(store, rank, size, timeout)
    mine = host_hash()
    store.set(f"host/{rank}", mine)
    hosts = [store.get(f"host/{other}").decode() for other in range(size)]
    return Placement("torch.distributed", rank, size, hosts.count(mine), None), StoreMessage(store)
