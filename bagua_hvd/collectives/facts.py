"""What the ranks of a process set tell each other: the largest and the smallest of numbers, in one small allreduce."""
from collections.abc import Sequence

from bagua_hvd.core import native
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import context

_LIMIT = 2**31 - 1


class Extremes:
    """The largest and the smallest of numbers that ranks have given, on their way: posted here, collective.

    A rank that is in join() meanwhile gives nothing.

    Args:
        values: integers from 0 to 2**31 - 2, as many on all ranks. name: of the operation. group: the ProcessSet.
        blocking: wait() follows at once.
    """

    def __init__(self, values: Sequence[int], name: str, group: ProcessSet, blocking: bool = False) -> None:
        count = self._count = len(values)
        # From 1 on, and the smallest as a largest: for a rank in join() the core puts zeros.
        sent = [value + 1 for value in values] + [_LIMIT - value for value in values]
        facts = self._facts = native.ffi.new("int32_t[]", sent)
        address = int(native.ffi.cast("uintptr_t", facts))
        view = native.TensorView(address, address, (2 * count,), native.INT32, facts)
        id: int = group.process_set_id      # type: ignore[assignment]  # a registered one has it
        self._operation = context().post(native.ALLREDUCE, name, [view], process_set=id, op=native.OP_MAX,
                                         blocking=blocking)

    def wait(self) -> list[tuple[int, int]]:
        """Blocks. Returns of each number the largest and the smallest that a rank has given."""
        self._operation.wait()
        facts, count = self._facts, self._count
        return [(facts[i] - 1, _LIMIT - facts[count + i]) for i in range(count)]


def extremes(values: Sequence[int], name: str, group: ProcessSet) -> list[tuple[int, int]]:
    """Of each number the largest and the smallest that a rank has given; see Extremes. Collective; blocks.

    Returns:
        A list of (largest, smallest).
    """
    return Extremes(values, name, group, blocking=True).wait()
