"""One rank of a soak; see soak.py. Exits with 1 at the first wrong result."""
import gc
import os
import sys
from pathlib import Path

import numpy as np
import psutil

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]
from plan import RANKS, Plan  # noqa: E402

from bagua_hvd.core import native  # noqa: E402
from bagua_hvd.job import basics  # noqa: E402
from memory import allocated_nbytes  # noqa: E402
from world import result, view  # noqa: E402

TRANSPORTS = ["auto", "tcp"]
OPERATIONS_PER_GENERATION = 2500
GROWTH_MAX = 1 << 20        # 7 bytes for each of the last 150,000 of 200,000 operations
KIND = {"allreduce": native.ALLREDUCE, "group": native.ALLREDUCE, "allgather": native.ALLGATHER,
        "broadcast": native.BROADCAST, "alltoall": native.ALLTOALL, "reducescatter": native.REDUCESCATTER,
        "barrier": native.BARRIER}


class Rank:
    """Carries out a plan up to a number of operations."""

    def __init__(self, seed):
        self._plan = Plan(seed)
        self.done = 0

    def init(self, transport):
        """Joins a new generation of the job; the process sets of the old one are gone."""
        os.environ["BAGUA_HVD_TRANSPORT"] = transport
        basics.init()
        self._context, self._rank = basics.context(), basics.rank()
        self._plan.sets = {0: list(range(RANKS))}

    def step(self):
        """One batch, or one change between batches."""
        change, joins = self._plan.next_sets(), self._plan.next_joins()
        if change:
            self._change_sets(*change)
        if joins:
            self._join(joins)
        batch = self._plan.next_batch()
        order = self._plan.orders(len(batch))[self._rank]
        running = {i: self._post(batch[i]) for i in order if self._rank in batch[i].members}
        for i, (operation, arrays) in running.items():
            operation.wait()
            self._check(batch[i], operation, arrays)
        self.done += len(batch)

    def leave(self):
        """Leaves the job when all ranks are done: rank 0 coordinates even sets without itself."""
        self._context.post(native.BARRIER, "leave").wait()
        basics.shutdown()
        self._context = None

    def _change_sets(self, what, which):
        if what == "add":
            operation = self._context.post(native.PROCESS_SET_ADD, f"add.{which}", splits=which)
            operation.wait()
            self._plan.sets[operation.value] = which
        else:
            operation = self._context.post(native.PROCESS_SET_REMOVE, f"remove.{which}", root_rank=which)
            operation.wait()
            del self._plan.sets[which]
        self.done += 1

    def _join(self, counts):
        """A joined rank contributes zeros."""
        for i in range(counts[self._rank]):
            values = np.full(5, 1 << self._rank, np.int64)
            self._context.post(native.ALLREDUCE, f"joining.{i}", [view(values, "int64", "in place")]).wait()
            assert (values == sum(1 << rank for rank in range(RANKS) if counts[rank] > i)).all(), (counts, i, values)
        operation = self._context.post(native.JOIN, "join")
        operation.wait()
        assert 0 <= operation.value < RANKS and counts[operation.value] == max(counts) or max(counts) == 0
        self.done += max(counts) + 1

    def _post(self, what):
        arrays, views = [], []
        for tensor in range(0 if what.kind == "barrier" else 3 if what.kind == "group" else 1):
            array = what.input(self._rank, tensor)
            in_place = what.kind in ("allreduce", "group", "broadcast")
            arrays.append(array)
            views.append(view(array, what.dtype, "in place" if in_place else None))
        splits = what.splits[what.members.index(self._rank)] if what.kind == "alltoall" else None
        operation = self._context.post(KIND[what.kind], what.name, views, op=what.reduction, root_rank=what.root,
                                       splits=splits, process_set=what.set_id)
        return operation, arrays

    def _check(self, what, operation, arrays):
        for tensor, array in enumerate(arrays):
            if what.kind not in ("allreduce", "group", "broadcast"):
                array = result(operation, 0, what.dtype, (what.width,))
            expected = what.expected(self._rank, tensor)
            assert array.shape == expected.shape and (array == expected).all(), (what, array, expected)


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(operations, seed):
    rank, process, seen = Rank(seed), psutil.Process(), []
    generations = max(4, operations // OPERATIONS_PER_GENERATION)
    for generation in range(generations):
        rank.init(TRANSPORTS[generation % len(TRANSPORTS)])
        number = basics.rank()
        while rank.done < operations * (generation + 1) // generations:
            rank.step()
        rank.leave()
        gc.collect()
        assert not [each.path for each in process.memory_maps() if each.path.startswith("/memfd:bagua_hvd")]
        seen.append((process.num_fds(), allocated_nbytes()))
        if number == 0 and generation % 10 == 9:
            say(f"{rank.done} operations, all right so far; rank 0: {seen[-1][0]} descriptors, {seen[-1][1] >> 10} KiB")
    # By then both transports and the largest tensors have been used.
    (descriptors, memory), (descriptors_now, memory_now) = seen[len(seen) // 4], seen[-1]
    say(f"rank {number}: {rank.done} operations, {generations} generations; after a quarter {descriptors} descriptors, "
        f"{memory >> 10} KiB allocated; at the end {descriptors_now}, {memory_now >> 10} KiB")
    assert descriptors_now <= descriptors, "descriptors are left behind"
    assert memory_now <= memory + GROWTH_MAX, "memory grows"



main(int(sys.argv[1]), int(sys.argv[2]))
