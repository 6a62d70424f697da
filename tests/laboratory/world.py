"""The cost of a large world: start-up, descriptors and memory of each rank, and an allreduce of a small set in it.

Ranks are light: forks of one process with the core and without a framework, all on this machine, over TCP on loopback.
So it measures the core's own cost, though all ranks share the machine's cores.

    python -m tests.laboratory.world                             # 16 to 256 ranks, and a pair within 2 to 128
    python -m tests.laboratory.world --ranks 64 --steps 100 --path ring --pair     # descriptors after 100 allreduces
"""
import argparse
import gc
import json
import math
import os
import resource
import socket
import sys
import time
from functools import partial
from typing import Any

import numpy as np

from bagua_hvd.bench import report
from bagua_hvd.core import native
from bagua_hvd.core.context import Context
from bagua_hvd.job.environment import Options
from bagua_hvd.job.rendezvous import Rendezvous, gather_endpoints

START_COLUMNS = ("ranks", "start-up s", "CPU s", "descriptors / rank", "of rank 0", "memory / rank KiB", "of rank 0")
PAIR_COLUMNS = ("world", "ranks", "allreduce of 4 B us", "lowest us")
START_SECONDS = 120
REPETITIONS = 400
_HOST = "127.0.0.1"


def _options(rank, size, port, secret, path):
    return Options(
        rank=rank, size=size, cross_rank=rank, cross_size=size, transport="tcp", rendezvous_host=_HOST,
        rendezvous_port=port, scope="bench.world", secret=secret, start_timeout_ms=START_SECONDS * 1000,
        timeout_ms=60000, stall_warning_ms=0, allreduce_path=path, negotiation_fanout=0)


def _private_kib():
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _descriptors():
    return len(os.listdir("/proc/self/fd"))


def _processor_seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class _Rank:
    """In a child process: one rank, which follows the parent's commands."""

    def __init__(self, rank, size, link, path):
        self.rank, self.size, self._link, self._path = rank, size, link, path
        self._value: Any = np.zeros(1, np.float32)
        address = self._value.ctypes.data
        self._view = native.TensorView(address, address, (1,), native.FLOAT32, self._value)

    def serve(self):
        """Responds to each line of the parent with one, until it hangs up."""
        for line in self._link:
            name, *arguments = json.loads(line)
            self._link.write(json.dumps(getattr(self, name)(*arguments)) + "\n")
            self._link.flush()

    def start(self, port, secret):
        before = _descriptors(), _private_kib(), _processor_seconds()
        options = _options(self.rank, self.size, port, bytes.fromhex(secret), self._path)
        self._context = Context(options, partial(gather_endpoints, options))
        after = _descriptors(), _private_kib(), _processor_seconds()
        self._before = before[0]
        return [new - old for new, old in zip(after, before, strict=True)]

    def _allreduce(self, name, process_set, size):
        self._value[0] = 1
        self._context.post(native.ALLREDUCE, name, [self._view], process_set=process_set, blocking=True).wait()
        if self._value[0] != size:
            raise RuntimeError(f"the sum of {size} ones is {self._value[0]}")

    def pair(self, ranks):
        """Microseconds of each allreduce of 4 B between the two; all ranks take part in adding the set."""
        process_set = 0
        if self.size > 2:
            added = self._context.post(native.PROCESS_SET_ADD, "bench.pair", splits=ranks, blocking=True)
            added.wait()
            process_set = added.value  # type: ignore[union-attr]
        if self.rank not in ranks:
            return []
        times = []
        for _ in range(REPETITIONS + REPETITIONS // 4):
            started = time.perf_counter_ns()
            self._allreduce("bench.small", process_set, 2)
            times.append((time.perf_counter_ns() - started) / 1e3)
        return times[REPETITIONS // 4:]

    def steps(self, count):
        """This rank's number of descriptors after this many allreduces of all ranks."""
        for _ in range(count):
            self._allreduce("bench.all", 0, self.size)
        return _descriptors() - self._before

    def leave(self):
        del self._context


class World:
    """This many ranks, each in its own process. A context manager."""

    def __init__(self, size, path=""):
        self._links: list[Any] = []
        self._processes: list[int] = []
        self._secret = os.urandom(32)
        gc.collect()
        gc.freeze()                 # untouched memory is shared with the children
        for rank in range(size):
            ours, theirs = socket.socketpair()
            process = os.fork()
            if process == 0:
                code = 1
                try:
                    ours.close()
                    for link in self._links:
                        link.close()
                    _Rank(rank, size, theirs.makefile("rw"), path).serve()
                    code = 0
                except BaseException as error:
                    print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
                finally:
                    os._exit(code)
            theirs.close()
            self._processes.append(process)
            self._links.append(ours.makefile("rw"))
            ours.close()
        self._rendezvous = Rendezvous(self._secret)     # starts a thread, so after the forks

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for link in self._links:
            link.close()
        for process in self._processes:
            os.waitpid(process, 0)
        self._rendezvous.close()

    def call(self, name, *arguments):
        """The results of this _Rank method in rank order; all ranks run it at the same time."""
        for link in self._links:
            link.write(json.dumps([name, *arguments]) + "\n")
            link.flush()
        answers = [link.readline() for link in self._links]
        if not all(answers):
            raise RuntimeError(f"rank {answers.index('')} ended")
        return [json.loads(answer) for answer in answers]

    def start(self):
        """(seconds until all are connected, by rank: [descriptors, KiB, CPU seconds])."""
        started = time.perf_counter()
        found = self.call("start", self._rendezvous.port, self._secret.hex())
        return time.perf_counter() - started, found


def _start_row(size, seconds, found):
    def middle(index):
        return f"{np.median([rank[index] for rank in found]):.0f}"

    processor = sum(rank[2] for rank in found)
    return (str(size), f"{seconds:.2f}", f"{processor:.1f}", middle(0), str(found[0][0]), middle(1), str(found[0][1]))


def exponent(sizes, seconds):
    """The exponent of the size that fits these times best."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def main(arguments=None):
    """Runs the program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.laboratory.world", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="*", type=int, default=[16, 32, 64, 128, 256],
                        help="of the worlds that are started")
    parser.add_argument("--pair", nargs="*", type=int, default=[2, 8, 32, 128], help="of the worlds with a small set")
    parser.add_argument("--members", nargs=2, type=int, default=[0, 1], help="of that set")
    parser.add_argument("--path", default="", help="of the allreduce, as in BAGUA_HVD_ALLREDUCE")
    parser.add_argument("--steps", type=int, default=0,
                        help="allreduces of all ranks, and the descriptors after them")
    options = parser.parse_args(arguments)
    lines, times = [], []
    for size in options.ranks:
        with World(size, options.path) as world:
            seconds, found = world.start()
            lines.append(_start_row(size, seconds, found))
            times.append(seconds)
            if options.steps:
                after = world.call("steps", options.steps)
                print(f"{size} ranks, {options.steps} steps: descriptors / rank {int(np.median(after))}, of rank 0 "
                      f"{after[0]}, at most {max(after[1:])} of another; log2 n = {math.log2(size):g}")
            world.call("leave")
    if lines:
        print(report.table(START_COLUMNS, lines, left=0))
    if len(lines) > 1:
        print(f"start-up ~ n^{exponent(options.ranks, times):.2f}")
    lines = []
    for size in options.pair:
        with World(size, options.path) as world:
            world.start()
            members = options.members if size > max(options.members) else [0, 1]
            taken = world.call("pair", members)[members[0]]
            lines.append((str(size), "{} and {}".format(*members), f"{np.median(taken):.1f}", f"{min(taken):.1f}"))
            world.call("leave")
    if lines:
        print(report.table(PAIR_COLUMNS, lines, left=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
