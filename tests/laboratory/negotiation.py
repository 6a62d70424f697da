"""Measures the cost of negotiation: every rank posts many tiny allreduces, for a growing number of ranks.

Ranks share the machine's few cores, so wall time means little. So the coordinator (rank 0) counts its CPU time for
coordination: reading requests, deciding and responding, with the system calls of its responses. Per tensor and
rank, that is the cost of each further rank. There are three cases: with the response cache ("cached": the names of a
running training), with new names ("new"), and with a wait for each tensor before the next one is posted ("single":
cached, but each in its own messages). It also counts its messages in both directions; in a tree
(BAGUA_HVD_NEGOTIATION=tree) only its children's.

As a program, `python -m tests.laboratory.negotiation BACKEND FOLDER OPTIONS`: one rank of one round, like bench.rank.
"""
import argparse
import json
import sys
import time
from dataclasses import dataclass

import numpy as np

from bagua_hvd.bench.rank import WrongResult, leave
from bagua_hvd.core import variables

TENSORS = 500
SINGLE_TENSORS = 50         # each takes a round trip
NAMES = ("cached", "new", "single")
REPETITIONS = 10
COLUMNS = ("ranks", "names", "coordinator ns / tensor / rank", "rank 0 messages / tensor", "rank 0 CPU us / tensor",
           "others CPU us / tensor", "control bytes / tensor / rank", "wall us / tensor")


@dataclass
class Row:
    """One line of the table. Times are medians over the rounds of medians over the repetitions."""

    ranks: int
    names: str
    coordinator_ns: float
    messages: float
    rank0_cpu_us: float
    others_cpu_us: float
    control_bytes: float
    wall_us: float

    def cells(self):
        return (str(self.ranks), self.names, f"{self.coordinator_ns:.0f}", f"{self.messages:.2f}",
                f"{self.rank0_cpu_us:.1f}", f"{self.others_cpu_us:.1f}", f"{self.control_bytes:.1f}",
                f"{self.wall_us:.1f}")


def rows(ranks, rounds):
    """The Rows for a number of ranks.

    Args:
        rounds: for each round run_round()'s result: by rank, {names: {quantity: [repetition]}}.
    """
    found = []
    for names in NAMES:
        def median(quantity, of_ranks, names=names):
            return float(np.median([np.median([rank[names][quantity] for rank in by_rank[of_ranks]])
                                    for by_rank in rounds]))

        first, others, everyone = slice(0, 1), slice(1, None), slice(None)
        found.append(Row(
            ranks, names, median("coordinator_ns", first) / ranks, median("messages", first),
            median("process_ns", first) / 1e3, median("process_ns", others) / 1e3,
            median("control_bytes", everyone), median("wall_ns", everyone) / 1e3,
        ))
    return found


def _now(context):
    counters = context.counters()
    return {"coordinator_ns": counters.coordinator_ns, "messages": counters.negotiation_messages,
            "control_bytes": counters.control_bytes_sent, "process_ns": time.process_time_ns(),
            "wall_ns": time.perf_counter_ns()}


def measure(context, size):
    """This rank's {names: {quantity: [repetition: mean over the tensors]}}. Raises if a sum is wrong."""
    from bagua_hvd.core import native

    values: np.ndarray = np.empty((TENSORS, 1), np.float32)
    views = [native.TensorView(value.ctypes.data, value.ctypes.data, value.shape, native.FLOAT32, value)
             for value in values]

    def barrier(name):
        context.post(native.BARRIER, name, blocking=True).wait()

    def repeat(prefix, at_once=True):
        used = views if at_once else views[:SINGLE_TENSORS]
        values.fill(1)
        barrier(f"{prefix}.ready")
        before = _now(context)
        running = []
        for index, tensor in enumerate(used):
            running.append(context.post(native.ALLREDUCE, f"{prefix}.{index}", [tensor], blocking=not at_once))
            if not at_once:
                running[-1].wait()
        for operation in running:
            operation.wait()
        after = _now(context)
        if not (values[:len(used)] == size).all():
            raise WrongResult("an allreduce of ones is not the number of ranks")
        return {quantity: (after[quantity] - before[quantity]) / len(used) for quantity in before}

    for _ in range(2):
        repeat("bench.cached")
    samples = {"cached": [repeat("bench.cached") for _ in range(REPETITIONS)],
               "single": [repeat("bench.cached", at_once=False) for _ in range(REPETITIONS)],
               "new": [repeat(f"bench.new.{number}") for number in range(REPETITIONS)]}
    barrier("bench.done")
    return {names: {quantity: [sample[quantity] for sample in of_names] for quantity in of_names[0]}
            for names, of_names in samples.items()}


def main(name, folder, options):
    """Runs one rank of one round. Returns the exit code."""
    from bagua_hvd.core import native
    from bagua_hvd.job import basics

    def work():
        basics.init()
        context = basics.context()
        native.lib.bhvd_context_measure_coordinator(context._pointer)
        found = measure(context, basics.size())
        basics.shutdown()
        return found

    return leave(folder, variables.read("HOROVOD_RANK"), work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], argparse.Namespace(**json.loads(sys.argv[3]))))
