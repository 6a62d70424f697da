"""One rank of a benchmark: runs the cases one after the other, checks every result, measures the times.

A sample is the mean of a batch of consecutive calls after a barrier. The tensor is refilled before each batch, since
sums in place grow by a factor of n with each call. Sizes are those of nccl-tests: the larger of a rank's input and
output, so allgather's is the output's, equal on all ranks.

As a program, `python -m bagua_hvd.bench.rank BACKEND FOLDER OPTIONS`: one rank of one round. It writes its times to
FOLDER/rank<r>.json, or the reason why there are none to FOLDER/rank<r>.error.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from bagua_hvd.job.environment import get_env_rank_and_size

if TYPE_CHECKING:
    import torch

    from bagua_hvd.bench.backends import Bagua, Gloo, Mpi

# Seconds per call, one number for each sample: by Case.key; by backend and Case.key, for each round.
Times = dict[str, list[float]]
Results = dict[str, dict[str, list[list[float]]]]
Others = dict[str, list[float | None]]          # by backend: cores that other programs used in each round

KIB, MIB = 1 << 10, 1 << 20
OPS = ("allreduce", "broadcast", "allgather", "alltoall", "reducescatter")
ITEM_NBYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
# Sums of the pattern are exact in all other dtypes.
RELATIVE_ERROR = {"float16": 2.0 ** -10, "bfloat16": 2.0 ** -7}
# Values of the pattern are integers in (rank + 1) + [0, PATTERN): small, so that sums are exact.
PATTERN = 7
SETTLE_SECONDS = 0.1


class Case(NamedTuple):
    """One line of the table. count: elements of the larger of a rank's buffers."""

    op: str
    count: int          # type: ignore[assignment]  # hides the method of tuples
    nbytes: int

    @property
    def key(self) -> str:
        return f"{self.op}/{self.nbytes}"


def human_nbytes(nbytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def resnet50_counts() -> list[int]:
    """Elements of ResNet-50's 161 parameter tensors, 25 557 032 in total, in the order of their gradients."""
    counts = [64 * 3 * 49, 64, 64]
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            counts += [width_in * width, width, width, width * width * 9, width, width,
                       width * width * 4, width * 4, width * 4]
            if block == 0:
                counts += [width_in * width * 4, width * 4, width * 4]
            width_in = width * 4
    return [*counts, 2048 * 1000, 1000][::-1]


def cases(options: argparse.Namespace, size: int) -> list[Case]:
    """The Cases in the order of the table. Sizes are rounded up to whole elements, and to a row for every rank."""
    item = ITEM_NBYTES[options.dtype]
    found = []
    for op in options.op:
        multiple = 1 if op in ("allreduce", "broadcast") else size
        for nbytes in options.sizes:
            count = -(-nbytes // (item * multiple)) * multiple
            found.append(Case(op, count, count * item))
    if options.many:
        count = sum(resnet50_counts())
        found.append(Case("many", count, count * item))
    return list(dict.fromkeys(found))


# (size limit, timed calls in a round, consecutive calls in a sample)
CALLS = ((KIB, 500, 25), (64 * KIB, 300, 20), (MIB, 60, 4), (16 * MIB, 8, 1), (math.inf, 5, 1))


def plan(nbytes: int, iterations: int | None, largest_batch: int) -> tuple[int, int]:
    """(samples, calls in a sample): by size, unless `iterations` sets the total number of calls."""
    calls, batch = next((calls, batch) for limit, calls, batch in CALLS if nbytes <= limit)
    calls = iterations or calls
    batch = max(1, min(batch, calls, largest_batch))
    return -(-calls // batch), batch


def _largest_batch(dtype, size):
    """Number of calls after which sums in place could overflow."""
    import torch

    dtype = getattr(torch, dtype)
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    return int(math.log(largest / (PATTERN + size)) / math.log(size)) if size > 1 else sys.maxsize


class Checker:
    """Generates every rank's input, and checks results against the expected output.

    Args:
        relaxed: the result was encoded twice by an 8-bit codec. average: it is the mean.
    """

    def __init__(self, rank: int, size: int, dtype: str, relaxed: bool = False, average: bool = False) -> None:
        import torch

        self.torch = torch
        self.rank, self.size, self.dtype = rank, size, getattr(torch, dtype)
        self.relative = RELATIVE_ERROR.get(dtype, 0.0)
        self.divisor = size if average else 1
        # Each rank's encoding has an error of range / 510; so has that of the sum, whose range is `size` times larger.
        span = PATTERN - 1
        self.absolute = 1.05 * 2 * size * span / 510 / self.divisor if relaxed else 0.0

    def pattern(self, count: int, rank: int | None = None) -> torch.Tensor:
        """The input of a rank (default: this one)."""
        rank = self.rank if rank is None else rank
        cycle = self.torch.arange(rank + 1, rank + 1 + PATTERN).to(self.dtype)
        return cycle.repeat(-(-count // PATTERN))[:count]

    def source(self, case: Case) -> torch.Tensor:
        return self.pattern(case.count // self.size if case.op == "allgather" else case.count)

    def expected(self, op: str, count: int) -> torch.Tensor:
        torch, size = self.torch, self.size
        if op == "broadcast":
            return self.pattern(count, 0)
        part = count // size
        if op == "allgather":
            return torch.cat([self.pattern(part, rank) for rank in range(size)])
        mine = slice(self.rank * part, (self.rank + 1) * part)
        if op == "alltoall":
            return torch.cat([self.pattern(count, rank)[mine] for rank in range(size)])
        # sum over ranks of (i % PATTERN + rank + 1)
        total = (self.pattern(count, 0) - 1) * size + size * (size + 1) // 2
        if self.divisor > 1:
            total = total / self.divisor
        return total[mine] if op == "reducescatter" else total

    def check(self, op: str, count: int, result: torch.Tensor) -> None:
        """Raises WrongResult, naming the first wrong element."""
        expected = self.expected(op, count)
        where = f"{op} of {human_nbytes(count * result.element_size())}"
        if result.shape != expected.shape or result.dtype != expected.dtype:
            raise WrongResult(f"{where}: the result is {result.dtype} of shape {tuple(result.shape)}, "
                              f"expected {expected.dtype} of shape {tuple(expected.shape)}")
        if self.torch.equal(result, expected):
            return
        error = (result.double() - expected.double()).abs()
        wrong = (~(error <= self.absolute + self.relative * expected.double().abs())).nonzero()
        if len(wrong):
            index = int(wrong[0])
            raise WrongResult(f"{where}: element {index} is {result[index].item()}, expected "
                              f"{expected[index].item()} ({len(wrong)} of {len(expected)} are wrong)")


def checker(name: str, options: argparse.Namespace, rank: int, size: int) -> Checker:
    """The Checker for a backend."""
    relaxed = average = False
    if options.algorithm:
        from bagua_hvd import algorithms

        algorithm = algorithms.get(options.algorithm)
        relaxed, average = algorithm.relaxed, algorithm.average
    mine = name.startswith("bagua")
    return Checker(rank, size, options.dtype, mine and relaxed, mine and average)


def _timed(backend, call, refill, samples, batch):
    times = []
    for _ in range(samples):
        refill()
        backend.barrier()
        started = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - started) / batch)
    return times


def _prepare(backend, case, checks):
    """(call, refill, check of the call's result)"""
    if case.op == "many":
        sources = [checks.pattern(count) for count in resnet50_counts()]
        tensors = [source.clone() for source in sources]

        def refill():
            for tensor, source in zip(tensors, sources, strict=True):
                tensor.copy_(source)

        def check(results):
            for result in results:
                checks.check("allreduce", result.numel(), result)

        return backend.many(tensors), refill, check
    source = checks.source(case)
    tensor = source.clone()
    call = getattr(backend, case.op)(tensor)
    return call, lambda: tensor.copy_(source), lambda result: checks.check(case.op, case.count, result)


def measure(name: str, backend: Bagua | Gloo | Mpi, options: argparse.Namespace) -> Times:
    """Seconds per call on this rank, by Case.key, one number for each sample. Raises WrongResult."""
    import torch

    torch.set_num_threads(1)
    checks = checker(name, options, backend.rank, backend.size)
    times = {}
    until = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < until:
        pass        # ranks that started on the same core take turns until the kernel separates them
    for case in cases(options, backend.size):
        call, refill, check = _prepare(backend, case, checks)
        # Twice: the first call with a name is negotiated, later ones may be cached. It is also a warm-up.
        for _ in range(2):
            refill()
            check(call())
        samples, batch = plan(case.nbytes, options.iterations, _largest_batch(options.dtype, backend.size))
        times[case.key] = _timed(backend, call, refill, samples, batch)
    return times


class WrongResult(Exception):
    """The result of a collective is wrong."""


def describe(error: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, WrongResult):
        return f"WRONG RESULT: {text}"
    return text if isinstance(error, (ValueError, NotImplementedError)) else f"{type(error).__name__}: {text}"


def _write(path, content):
    # Never an incomplete file: the ranks may be killed at any time.
    with open(path + ".part", "w") as file:
        json.dump(content, file)
    os.rename(path + ".part", path)


def leave(folder: str, rank: int, work: Callable[[], object]) -> int:
    """Writes work()'s result, or its error, to the rank's file. Returns the exit code."""
    try:
        _write(os.path.join(folder, f"rank{rank}.json"), work())
        return 0
    except Exception as error:
        _write(os.path.join(folder, f"rank{rank}.error"), f"rank {rank}: {describe(error)}")
        print(describe(error), file=sys.stderr, flush=True)
        return 1


def main(name: str, folder: str, options: argparse.Namespace,
         measure: Callable[[str, Any, argparse.Namespace], object] = measure) -> int:
    """Runs one rank of one round. Returns the exit code. measure: another function like measure()."""
    from bagua_hvd.bench import backends

    backend: Any = None

    def work():
        nonlocal backend
        backend = backends.create(name, options, folder)
        times = measure(name, backend, options)
        backend.barrier()
        return times

    exit_code = leave(folder, get_env_rank_and_size()[0], work)
    if exit_code == 0:
        backend.close()
    elif isinstance(backend, backends.Mpi):
        backend.abort()
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], argparse.Namespace(**json.loads(sys.argv[3]))))
