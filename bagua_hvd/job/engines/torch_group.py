"""Joins the ranks of a torch.distributed group that exists already: they meet by its store.

What the environment says does not matter then: a group may have been made by file://, by Ray, by a notebook.
"""
import sys

from bagua_hvd.job.engines.detect import Placement
from bagua_hvd.job.engines.exchange_store import StoreMessage
from bagua_hvd.job.host_hash import host_hash

_PREFIX = "bagua_hvd/"


def default_group():
    """(store, rank, size) of torch.distributed's default group; None: this process has none. Imports nothing."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store(), distributed.get_rank(), distributed.get_world_size()


def meet(store, rank, size):
    """(Placement, exchange) for a Membership, collective over the ranks that share the store.

    Raises:
        RuntimeError: a rank did not come within the store's timeout.
    """
    # Ranks may have been in other jobs before: they count what they did with this store only.
    meeting = f"{_PREFIX}{store.add(f'{_PREFIX}meetings/{rank}', 1)}"
    mine = host_hash()
    store.set(f"{meeting}/host/{rank}", mine)
    hosts = [store.get(f"{meeting}/host/{other}").decode() for other in range(size)]
    return Placement("torch.distributed", rank, size, hosts.count(mine), None), StoreMessage(store, meeting)
