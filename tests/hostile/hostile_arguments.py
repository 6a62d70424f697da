"""Shared by api_rank_*: random arguments for public collectives, most of them invalid, and a rank's rounds."""
import collections
import faulthandler
import random
import sys

import numpy as np

SHAPES = [(), (0,), (1,), (5,), (2, 3), (0, 4), (3, 0, 2), (4, 1), (1,) * 30, (1, 5000), (6,), (8,)]
NUMBERS = [0, 1, -1, 2, 3, -2**31, 2**31 - 1, 2**31, 2**32, -2**63, 2**63, 2**70, 1.0, 0.5, -0.0, float("nan"),
           float("inf"), 1e308, True, None, "1", "", b"1", [], [1], (), {}, 1j, np.int64(1), np.float32(2),
           object(), len, type]
NAMES = ["", "a", "a b", "\0", "x\0y", "\ud800", "\N{SNOWMAN}" * 20, "%s%n", "n" * 65530, "n" * 70000, b"name", 3, None,
         ["n"]]
SPLITS = [None, [1, 1], [0, 0], [3, 3], [2**31, 0], [-1, 1], [1], [], [1.5, 0], ["1", 1], [2**70, 0], [None, 1],
          np.array([1, 1]), np.array([2.0, 0])]
RANKS = [[0, 1], [1], [0], [], [5], [-1], [0, 0], [2**40], ["a"], [1.5]]


class Arguments:
    """Random arguments.

    Args:
        hvd: the front end. rng: in the same state on all ranks if arguments must be equal. sets: ProcessSets,
            registered ones first. number: of the round. hostility: the share of hostile arguments. alike: all ranks
            make equal calls. more: further hostile numbers.
    """

    def __init__(self, hvd, rng, sets, number, hostility, alike, more):
        self.hvd, self.rng, self.sets, self.number = hvd, rng, sets, number
        self.hostility, self.alike, self.numbers = hostility, alike, [*NUMBERS, *more]

    def hostile(self):
        return self.rng.random() < self.hostility

    def any_number(self, good):
        return self.rng.choice(self.numbers) if self.hostile() else good

    def tensor(self):
        raise NotImplementedError

    def tensors(self):
        one, few = self.ones(1), self.ones(2)
        choices = [lambda: [], lambda: self.tensor(), lambda: None, lambda: {"a": few}, lambda: "ab",
                   lambda: [one] * 300, lambda: (self.tensor() for _ in range(2)), lambda: [[one]]]
        return self.rng.choice(choices)() if self.rng.random() < self.hostility / 2 else [
            self.tensor() for _ in range(self.rng.randrange(1, 4))]

    def ones(self, count):
        raise NotImplementedError

    def name(self):
        if self.rng.random() < self.hostility / 3:
            # Unnamed operations match by their number, so ranks with different calls must name theirs.
            return self.rng.choice([name for name in NAMES if name or self.alike])
        return f"round.{self.number}"

    def process_set(self):
        others = [*self.sets, self.hvd.ProcessSet([0]), None, 5, "set", 0, -1, self.hvd.ProcessSet]
        return self.rng.choice(others) if self.hostile() else self.sets[self.rng.randrange(3)]

    def op(self):
        hvd = self.hvd
        known = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
        return self.rng.choice([*known, *self.numbers]) if self.hostile() else hvd.Sum

    def splits(self, *more):
        return self.rng.choice([*SPLITS, *more, *self.numbers]) if self.hostile() else None

    def ranks(self):
        return self.rng.choice([*RANKS, *self.numbers])

    def compression(self):
        compression = self.hvd.Compression
        return self.rng.choice([compression.fp16, None, 5, "fp16", object]) if self.hostile() else compression.none

    def reduction(self):
        arguments = {"op": self.op(), "prescale_factor": self.any_number(1.0), "postscale_factor": self.any_number(1.0),
                     "process_set": self.process_set()}
        if self.rng.random() < 0.1:
            arguments["average"] = self.rng.choice([True, False, None, 3])
        return arguments


# ---- a rank's run ---------------------------------------------------------------------------------------------

ROUND_SECONDS = 120


def run_rounds(hvd, run_round, count, seed):
    """Calls run_round(number, shared, own, sets, endings) `count` times; it counts the calls' endings.

    shared: random numbers, equal on both ranks; own: different ones. sets: the global one, one of each rank, and one of
    both. A round that hangs prints its stack, and ends the process.
    """
    sets = [hvd.global_process_set, hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    hvd.init(process_sets=sets[1:])
    sets.append(hvd.ProcessSet([0, 1]))
    shared, own = random.Random(seed), random.Random(seed * 1000 + hvd.rank())
    endings = collections.defaultdict(collections.Counter)
    for number in range(count):
        faulthandler.dump_traceback_later(ROUND_SECONDS, exit=True)
        try:
            run_round(number, shared, own, sets, endings)
        except BaseException:
            print(f"rank {hvd.rank()}: round {number} of seed {seed}", file=sys.stderr, flush=True)
            raise
    faulthandler.cancel_dump_traceback_later()
    total = sum(endings.values(), collections.Counter())
    if hvd.rank() == 0:
        for name in sorted(endings):
            print(f"{name}: {dict(endings[name])}")
    print(f"rank {hvd.rank()}: {sum(total.values())} calls: {dict(total)}", flush=True)
