"""A rank of a job with injected faults: checks the results of its operations with NumPy, until it is stopped or fails.

The ranks and the injecting process share an array of integers (`Board`) in a file. Each rank writes its events into its
own file, one JSON object per line: `begins`, `acts`, `wrong`, and finally `raised`, `failed` or `ended`.
"""
import ctypes
import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

CLONE_NEWNET = 0x40000000
COUNT_MAX = 50_000
LARGE_COUNT = 24 << 20          # of float32: exceeds every memory limit of a fault
PACE_SECONDS = 0.002            # between steps, so that a few cores can run several jobs


class Board:
    """Attributes, all views of one array in shared memory:

    steps: by rank, the number of completed steps. acts: by rank, its action before the next step: 0 (none), or 1 +
    index in ACTS. last: not 0: the job ends. large: not 0: one operation with much memory is due.
    """

    def __init__(self, path, size):
        cells = np.memmap(path, np.int64, "r+", shape=(2 * size + 2,))
        self.steps, self.acts = cells[:size], cells[size:2 * size]
        self.last, self.large = cells[-2:-1], cells[-1:]

    @staticmethod
    def create(path, size):
        Path(path).write_bytes(bytes(8 * (2 * size + 2)))
        return Board(path, size)


# ----------------------------------------------------------------------------------------- faults of a rank's own

def exit_without_error(seconds):
    sys.exit(0)


def exit_abruptly(seconds):
    os._exit(0)


def raise_an_error(seconds):
    raise RuntimeError("an error in the user's program")


def fork_a_child(seconds):
    if os.fork() == 0:
        os._exit(0)
    os.wait()


def die_before_a_child(seconds):
    """For a while, the child holds copies of the parent's open descriptors."""
    if os.fork() == 0:
        time.sleep(seconds)
        os._exit(0)
    os.kill(os.getpid(), 9)


def compute(seconds):
    """Python code that never waits."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


def run_out_of_memory(seconds):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + (8 << 20))


def run_out_of_descriptors(seconds):
    _limit(resource.RLIMIT_NOFILE, 1)


def jump_an_hour_ahead(seconds):
    _jump(3600)


def jump_an_hour_back(seconds):
    _jump(-3600)


ACTS = [exit_without_error, exit_abruptly, raise_an_error, fork_a_child, die_before_a_child, compute, run_out_of_memory,
        run_out_of_descriptors, jump_an_hour_ahead, jump_an_hour_back]


def _limit(what, value):
    resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def _jump(seconds):
    before = time.time()
    ctypes.CDLL(None).shift_wall_clock(seconds)
    assert abs(time.time() - before - seconds) < 60


# ------------------------------------------------------------------------------------------------------ the rank

def values(seed, step, rank, count):
    """Whole numbers, so that sums are exact in any order."""
    return np.random.default_rng((seed, step, rank)).integers(-1000, 1000, count).astype(np.float32)


class Rank:
    def __init__(self, hvd, board, seed, note):
        import torch

        self.torch, self.hvd, self.board, self.seed, self.note = torch, hvd, board, seed, note
        self.rank, self.size = hvd.rank(), hvd.size()
        self.rows = torch.full((LARGE_COUNT // self.size,), float(self.rank))

    def check(self, what, step, got, expected):
        if not np.array_equal(np.asarray(got), expected):
            self.note(event="wrong", what=what, step=step)
            raise AssertionError(f"{what} of step {step} has a wrong result")

    def step(self, step):
        """One operation; the step number selects it, so that all ranks call the same."""
        hvd, torch = self.hvd, self.torch
        shape = np.random.default_rng((self.seed, step))
        count = int(shape.integers(1, COUNT_MAX if step % 8 == 0 else 500))
        kind = int(shape.integers(4))
        own = torch.from_numpy(values(self.seed, step, self.rank, count))
        every = [values(self.seed, step, rank, count) for rank in range(self.size)]
        if kind == 0:
            self.check("allreduce", step, hvd.allreduce(own, op=hvd.Sum, name="sum"), np.sum(every, 0))
        elif kind == 1:
            for part, got in enumerate(hvd.grouped_allreduce([own, own[:1], -own], op=hvd.Max, name="group")):
                wanted = np.max([-v if part == 2 else v[:1] if part == 1 else v for v in every], 0)
                self.check("grouped_allreduce", step, got, wanted)
        elif kind == 2:
            rows = [v[:len(v) // (rank + 1)] for rank, v in enumerate(every)]
            self.check("allgather", step, hvd.allgather(torch.from_numpy(rows[self.rank]), name="rows"),
                       np.concatenate(rows))
        else:
            self.check("broadcast", step, hvd.broadcast(own, step % self.size, name=f"root.{step % self.size}"),
                       every[step % self.size])

    def large(self):
        got = self.hvd.allgather(self.rows, name="large")
        self.check("large allgather", -1, got[::LARGE_COUNT // self.size], np.arange(self.size, dtype=np.float32))

    def run(self, seconds):
        for step in range(1 << 40):
            act = int(self.board.acts[self.rank])
            self.board.acts[self.rank] = 0
            if act:
                self.note(event="acts")
                ACTS[act - 1](seconds)
            orders = self.torch.tensor([int(self.board.last[0]), int(self.board.large[0])])
            last, large = self.hvd.broadcast(orders, 0, name="orders").tolist()
            if last:
                return
            if large:
                self.board.large[0] = 0
                self.large()
            self.step(step)
            time.sleep(PACE_SECONDS)
            self.board.steps[self.rank] = step + 1


def work(folder, seed, namespace, descriptors, seconds):
    """A rank, from init() to its end.

    Args:
        folder: contains the board and the event files.
        namespace: the name of the network namespace to run in, or None.
        descriptors: RLIMIT_NOFILE, or None.
        seconds: duration of acts that take time.
    """
    if namespace:
        with open(f"/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) == 0
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    events = open(f"{folder}/events.{rank}", "a", buffering=1)

    def note(**event):
        events.write(json.dumps({"at": time.monotonic(), **event}) + "\n")

    import bagua_hvd.torch as hvd

    if descriptors:
        _limit(resource.RLIMIT_NOFILE, descriptors)
    note(event="begins")
    try:
        hvd.init()
        Rank(hvd, Board(f"{folder}/board", size), seed, note).run(seconds)
    except hvd.HorovodInternalError as error:
        note(event="raised", message=str(error))
    except Exception as error:
        note(event="failed", message=f"{type(error).__name__}: {error}")
        raise
    else:
        note(event="ended")
