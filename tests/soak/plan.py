"""The operations of a soak, drawn from the seed only, so that all ranks know them and every correct result.

Values are whole numbers from 0 to 3, so that sums and products over four ranks are exact in every dtype.
"""
import random
from dataclasses import dataclass

import numpy as np

from bagua_hvd.core import native

RANKS = 4
DTYPES = ["uint8", "int8", "int32", "int64", "float16", "float32", "float64"]
KINDS = ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "group"]
REDUCTIONS = {native.OP_SUM: np.sum, native.OP_MIN: np.min, native.OP_MAX: np.max, native.OP_PRODUCT: np.prod}
_BATCH_MAX = 24


@dataclass
class Operation:
    """One operation of a batch.

    Attributes:
        members: ranks, ascending. number: makes the values unique. rows, width: the shape. splits: [from][to].
    """

    kind: str
    name: str
    set_id: int
    members: list
    number: int
    dtype: str
    rows: int
    width: int
    reduction: int
    root: int
    splits: list

    def input(self, rank, tensor=0):
        """The rank's input, shape (rows, width)."""
        position = self.members.index(rank)
        rows = sum(self.splits[position]) if self.kind == "alltoall" else self.rows_of(rank)
        pattern = np.arange(rows * self.width) * (1 + self.number % 3) + rank * 7 + self.number + tensor
        return (pattern % 4).astype(self.dtype).reshape(rows, self.width)

    def rows_of(self, rank):
        """The rank's number of rows, which differs in an allgather."""
        return self.rows + (rank + self.number) % 3 if self.kind == "allgather" else self.rows

    def expected(self, rank, tensor=0):
        """The rank's expected result."""
        inputs = {member: self.input(member, tensor) for member in self.members}
        position = self.members.index(rank)
        if self.kind == "allgather":
            return np.concatenate([inputs[member] for member in self.members])
        if self.kind == "broadcast":
            return inputs[self.root]
        if self.kind == "alltoall":
            return np.concatenate([
                inputs[member][sum(self.splits[i][:position]):sum(self.splits[i][:position + 1])]
                for i, member in enumerate(self.members)])
        total = REDUCTIONS[self.reduction](np.stack(list(inputs.values())), axis=0).astype(self.dtype)
        if self.kind == "reducescatter":
            share, more = divmod(self.rows, len(self.members))
            first = position * share + min(position, more)
            return total[first:first + share + (position < more)]
        return total


class Plan:
    """Endless batches; the caller keeps `sets` (id -> members) up to date."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._number = 0
        self.sets = {0: list(range(RANKS))}

    def next_sets(self):
        """("add", members), ("remove", id), or None: no change."""
        chance = self._random.random()
        removable = [each for each in self.sets if each]
        if chance < 0.03 and len(self.sets) < 6:
            members = sorted(self._random.sample(range(RANKS), self._random.choice([1, 2, 2, 3])))
            return None if members in self.sets.values() else ("add", members)
        if chance < 0.05 and removable:
            return "remove", self._random.choice(removable)
        return None

    def next_joins(self):
        """How many allreduces each rank makes before it joins; None: no join now."""
        return [self._random.randrange(5) for _ in range(RANKS)] if self._random.random() < 0.04 else None

    def next_batch(self):
        """Operations that may run concurrently."""
        return [self._draw(slot) for slot in range(self._random.randint(1, _BATCH_MAX))]

    def orders(self, count):
        """Each rank's order of `count` operations."""
        return [self._random.sample(range(count), count) for _ in range(RANKS)]

    def _draw(self, slot):
        draw = self._random
        self._number += 1
        kind = draw.choice(KINDS)
        set_id = draw.choice([0, 0, *self.sets])
        members = self.sets[set_id]
        # A few small sizes, so that many requests repeat, and use the cached id; now and then a large one.
        rows, width = draw.choice([0, 1, 2, 3, 5, 17, 64]), draw.choice([1, 3, 8])
        if draw.random() < 0.01:
            rows = draw.choice([20_000, 50_001])
        reductions = list(REDUCTIONS)[:1] if kind == "reducescatter" else list(REDUCTIONS)
        reduction, dtype = draw.choice(reductions), draw.choice(DTYPES)
        root = draw.choice(members)
        splits = [[draw.randrange(4) for _ in members] for _ in members]
        name = f"{kind}.{slot}.{dtype}.{rows}x{width}.{reduction}.{root}"
        return Operation(kind, name, set_id, members, self._number, dtype, rows, width, reduction, root, splits)
