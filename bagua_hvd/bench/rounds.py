"""Starts the ranks: the backends in turn (A B C A B C ...), fresh processes for every round; none remain at the end.

baguarun starts the ranks of bagua and gloo, mpiexec those of MPI. Both end with this process, and so do their ranks.
"""
import argparse
import functools
import importlib.util
import io
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bagua_hvd.bench.rank import Others, Results, Times
from bagua_hvd.core import variables
from bagua_hvd.runner.common.util.safe_shell_exec import execute

ROUND_TIMEOUT_SECONDS = 900
Watched = tuple[Times, float | None]     # and the cores used by other programs
Guard = Callable[[Callable[[], Watched]], Watched]
MPI_DTYPES = ("float32", "float64", "int32", "int64")


class RoundFailed(RuntimeError):
    """A round gave no times; the message says which, and why."""


def find_mpiexec() -> str | None:
    """The mpiexec installed with this Python, else one in PATH, else None."""
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return beside if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def why_left_out(backend: str, options: argparse.Namespace) -> str | None:
    """The reason why this backend cannot be measured here, or None."""
    if importlib.util.find_spec("torch") is None:
        return "no module named torch"
    if backend == "mpi":
        if importlib.util.find_spec("mpi4py") is None:
            return "no module named mpi4py"
        if options.dtype not in MPI_DTYPES:
            return f"mpi4py has no {options.dtype}"
        if find_mpiexec() is None:
            return "no mpiexec"
    return None


def _command(program, backend, options, folder, hosts):
    rank = [sys.executable, "-m", program, backend, folder, json.dumps(vars(options))]
    if hosts:
        rank = hosts.command(rank)
    if backend == "mpi":
        launcher = [find_mpiexec(), "-n", str(options.np)]
    else:
        launcher = [sys.executable, "-m", "bagua_hvd.runner.launch", "-np", str(options.np)]
    return [*launcher, *rank]


def _environment():
    root = str(Path(__file__).parents[2])
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }


def _reason(folder, output):
    """The first error that a rank left, and the launcher's last line of output."""
    errors = sorted(Path(folder).glob("rank*.error"), key=lambda path: path.stat().st_mtime_ns)
    sentences = [json.loads(path.read_text()) for path in errors]
    # A rank with a wrong result explains the errors of the others, which may have been reported sooner.
    sentences.sort(key=lambda sentence: "WRONG RESULT" not in sentence)
    last = [line.strip() for line in output.splitlines() if line.strip()][-1:]
    return " | ".join(sentences[:1] + last) or "no output"


def run_round(backend: str, options: argparse.Namespace, hosts: Any = None,
              program: str = "bagua_hvd.bench.rank") -> list[Times]:
    """Runs one round; returns a list over ranks of {Case.key: [seconds]}.

    Args:
        hosts: hosts.Hosts, for the ranks; None: all on this host.
        program: module that a rank runs, with backend, folder and options as its arguments.
    Raises:
        RoundFailed: a rank failed, or the round took too long. None of its processes remains.
    """
    job = hosts.job(options.np, backend) if hosts else nullcontext({})
    output, too_long = io.StringIO(), threading.Event()
    with tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder, job as variables:
        timer = threading.Timer(ROUND_TIMEOUT_SECONDS, too_long.set)
        timer.start()
        try:
            exit_code = execute(_command(program, backend, options, folder, hosts), {**_environment(), **variables},
                                output, output, events=[too_long])
        finally:
            timer.cancel()
        if too_long.is_set():
            raise RoundFailed(f"{backend}: not finished after {ROUND_TIMEOUT_SECONDS} seconds")
        text = output.getvalue()
        if exit_code:
            raise RoundFailed(f"{backend}: {_reason(folder, text)}")
        try:
            return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(options.np)]
        except FileNotFoundError:
            raise RoundFailed(f"{backend}: a rank left no times | {_reason(folder, text)}") from None


def _others_seconds():
    """(now, seconds of the processors that other programs have used; those of our processes are known at their end)."""
    with open("/proc/stat") as file:
        user, nice, system = map(int, file.readline().split()[1:4])
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ours = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return time.monotonic(), (user + nice + system) / os.sysconf("SC_CLK_TCK") - ours


@contextmanager
def others_cpu() -> Iterator[Any]:
    """Yields an object; its `used` is then the average number of cores that other programs used; None without /proc."""
    measured = SimpleNamespace(used=None)
    try:
        began = _others_seconds()
    except (OSError, ValueError):
        began = None
    yield measured
    if began:
        elapsed, used = (now - before for now, before in zip(_others_seconds(), began, strict=True))
        measured.used = max(0.0, used / elapsed)


def slowest(by_rank: Sequence[Times]) -> Times:
    """{Case.key: [seconds]}: for each sample, the time of the slowest rank."""
    return {key: [max(sample) for sample in zip(*(times[key] for times in by_rank), strict=True)] for key in by_rank[0]}


def _watched(run, name):
    with others_cpu() as cpu:
        times = run(name)
    return times, cpu.used


def interleaved(names: Sequence[str], options: argparse.Namespace, run: Callable[[str], Times],
                guard: Guard | None = None) -> tuple[Results, Others]:
    """Measures every backend once in each round.

    Args:
        run: function of a backend's name that returns the result of slowest().
        guard: runs a round, a function without arguments, and may repeat it; None: each round runs once.
    Returns:
        {backend: {Case.key: [round: [seconds]]}}, and {backend: [round: cores used by other programs]}.
    """
    results: Results = {name: {} for name in names}
    others: Others = {name: [] for name in names}
    for number in range(1, options.rounds + 1):
        for name in names:
            watched = functools.partial(_watched, run, name)
            times, used = guard(watched) if guard else watched()
            others[name].append(used)
            for key, samples in times.items():
                results[name].setdefault(key, []).append(samples)
            if sys.stderr.isatty() and variables.read("HOROVOD_RANK") == 0:
                print(f"round {number} of {options.rounds}: {name}", file=sys.stderr)
    return results, others


def in_job(options: argparse.Namespace, measure: Callable[[str, Any], Times]) -> tuple[Results, Others]:
    """The result of interleaved(), from the ranks of this job, which this process is one of.

    Args:
        measure: function of a backend's name and the backend that returns {Case.key: [seconds]} of this rank.
    """
    from bagua_hvd.bench import backends

    bagua = backends.Bagua(options)
    gloo = backends.create_gloo_within(bagua) if "gloo" in options.backends else None

    def run(name):
        return slowest(bagua.hvd.allgather_object(measure(name, gloo if name == "gloo" else bagua)))

    results, _ = interleaved(options.backends, options, run)
    if gloo:
        gloo.close()
    bagua.close()
    # The other ranks are other programs, too: their share of the CPU time is unknown.
    return results, {}
