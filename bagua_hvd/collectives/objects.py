"""Broadcast and allgather of Python objects: the interface of front ends to core/objects.py."""
from typing import Any

from bagua_hvd.collectives.arguments import check_name
from bagua_hvd.core import objects
from bagua_hvd.job import basics
from bagua_hvd.job.process_sets import context_and_id


def broadcast_object(obj: Any, root_rank: int, name: str | None, process_set: Any) -> Any:
    """Gives every rank of the process set a copy of the root's object, sent with cloudpickle.

    Args:
        obj: used on the root only.
        root_rank: global rank.
        name: the same on all ranks (and so is the default, whatever class the objects have).
        process_set: the ranks taking part.
    Returns:
        `obj` itself on the root, else the copy.
    Raises:
        ValueError: the root or this rank is not in the set. HorovodInternalError: a rank was lost, or could not
            serialize its object; that rank raises the error of cloudpickle.
    """
    check_name(name, "broadcast_object()")
    context, id = context_and_id(process_set)
    return objects.broadcast_object(context, obj, root_rank, basics.rank() == root_rank, name or "object", id)


def allgather_object(obj: Any, name: str | None, process_set: Any) -> list:
    """Gathers the ranks' objects, sent with cloudpickle, in a list in rank order.

    Args:
        obj: anything that cloudpickle can serialize.
        name: the same on all ranks (and so is the default, whatever class the objects have).
    Raises:
        ValueError: this rank is not in the set. HorovodInternalError: as broadcast_object().
    """
    check_name(name, "allgather_object()")
    context, id = context_and_id(process_set)
    return objects.allgather_object(context, obj, name or "object", id)
