"""Python objects over the ranks, the interface of front ends to core/objects.py; and extremes of integers."""
from collections.abc import Sequence
from typing import Any

from bagua_hvd.collectives.arguments import check_name
from bagua_hvd.core import native, objects
from bagua_hvd.job import basics
from bagua_hvd.job.process_sets import ProcessSet, context_and_id
from bagua_hvd.job.runtime import context


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


def allgather_object(obj: Any, name: str | None, process_set: Any) -> Any:
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


_LIMIT = 2**31 - 1


class Extremes:
    """The largest and the smallest of numbers over the ranks, by one small allreduce, which the constructor posts.

    Collective. A rank in join() contributes nothing.

    Args:
        values: integers from 0 to 2**31 - 2, equally many on all ranks. name: of the operation.
        blocking: wait() follows immediately.
    """

    def __init__(self, values: Sequence[int], name: str, group: ProcessSet, blocking: bool = False) -> None:
        count = self._count = len(values)
        # Shifted to begin at 1, and the smallest as a largest: the core puts zeros for a rank in join().
        sent = [value + 1 for value in values] + [_LIMIT - value for value in values]
        facts = self._facts = native.ffi.new("int32_t[]", sent)
        address = int(native.ffi.cast("uintptr_t", facts))
        view = native.TensorView(address, address, (2 * count,), native.INT32, facts)
        id: int = group.process_set_id      # type: ignore[assignment]  # a registered one has it
        self._operation = context().post(native.ALLREDUCE, name, [view], process_set=id, op=native.OP_MAX,
                                         blocking=blocking)

    def wait(self) -> list[tuple[int, int]]:
        """Blocks. Returns (largest, smallest) over the ranks for each number."""
        self._operation.wait()
        facts, count = self._facts, self._count
        return [(facts[i] - 1, _LIMIT - facts[count + i]) for i in range(count)]


def extremes(values: Sequence[int], name: str, group: ProcessSet) -> list[tuple[int, int]]:
    """(largest, smallest) of each number over the ranks; see Extremes. Collective; blocks."""
    return Extremes(values, name, group, blocking=True).wait()
