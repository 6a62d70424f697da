"""What the ranks of a process set tell each other: the largest and the smallest of numbers, in one small allreduce."""
from collections.abc import Sequence

from bagua_hvd.core import native
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import context

_LIMIT = 2**31 - 1


def extremes(values: Sequence[int], name: str, group: ProcessSet) -> list[tuple[int, int]]:
    """Of each number the largest and the smallest that a rank has given. Collective; blocks.

    A rank that is in join() meanwhile gives nothing.

    Args:
        values: integers from 0 to 2**31 - 2, as many on all ranks. name: of the operation. group: the ProcessSet.
    Returns:
        A list of (largest, smallest).
    """
    count = len(values)
    # From 1 on, and the smallest as a largest: for a rank in join() the core puts zeros.
    sent = [value + 1 for value in values] + [_LIMIT - value for value in values]
    facts = native.ffi.new("int32_t[]", sent)
    address = int(native.ffi.cast("uintptr_t", facts))
    view = native.TensorView(address, address, (2 * count,), native.INT32, facts)
    id: int = group.process_set_id      # type: ignore[assignment]  # a registered one has it
    context().post(native.ALLREDUCE, name, [view], process_set=id, op=native.OP_MAX, blocking=True).wait()
    return [(facts[i] - 1, _LIMIT - facts[count + i]) for i in range(count)]
