"""Maximum and minimum of integers over the ranks of a process set, by one small allreduce."""
from collections.abc import Sequence

from bagua_hvd.core import native
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import context

_LIMIT = 2**31 - 1


class Extremes:
    """The largest and the smallest of numbers over the ranks, in flight: the constructor posts it. Collective.

    A rank in join() contributes nothing.

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
