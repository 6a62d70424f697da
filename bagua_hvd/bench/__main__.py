"""Measures the collectives of bagua_hvd through its public interface, beside torch's gloo and MPI.

Starts its ranks itself. Started as the ranks of a job (`baguarun -np N python -m bagua_hvd.bench`) it measures in that
job, without peers unless --backends names gloo.

Exit codes: 0; 1, a rank failed or a result was wrong; 2, a wrong command line; 128 + n, stopped by signal n.
"""
import argparse
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bagua_hvd.bench.rank import Others, Results

# Before anything imports torch: a job's ranks measure in this process.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

from bagua_hvd import algorithms  # noqa: E402
from bagua_hvd.bench import report, rounds  # noqa: E402
from bagua_hvd.bench.rank import (  # noqa: E402
    ITEM_NBYTES,
    OPS,
    cases,
    describe,  # noqa: E402
    measure,
)
from bagua_hvd.core import native, variables  # noqa: E402

BACKENDS = ("bagua", "gloo", "mpi")
SIZES = "4,1K,64K,1M,16M,64M"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class _Parser(argparse.ArgumentParser):
    """Prints one sentence instead of the whole usage; in a job, only on rank 0."""

    def error(self, message):
        if job_rank() == 0:
            sys.stderr.write(f"bench: error: {message} (see `{self.prog} --help`)\n")
        sys.exit(2)


def job_rank() -> int:
    """This process's rank in its job; 0 outside a job."""
    return variables.read("HOROVOD_RANK")


def _size(text):
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if not match or int(match[1]) == 0:
        raise ValueError(f"--sizes: {text!r} is not a number of bytes such as 4, 64K or 16M")
    return int(match[1]) * _UNITS[match[2]]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _listed(texts):
    """Values given separately or with commas, without duplicates."""
    return list(dict.fromkeys(value for text in texts for value in text.split(",") if value))


def _known(option, texts, known):
    values = _listed(texts)
    for value in values:
        if value not in known:
            raise ValueError(f"{option}: {value!r} is unknown; choose from {', '.join(known)}")
    if not values:
        raise ValueError(f"{option} names nothing; choose from {', '.join(known)}")
    return values


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m bagua_hvd.bench", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog="Separate list entries by commas or spaces: --op allreduce,broadcast --sizes 4 64K 16M.")
    parser.add_argument("-n", "-np", "--np", type=positive, metavar="N", help="ranks; default 2, in a job its size")
    parser.add_argument("--op", nargs="+", metavar="OP", help=f"of {', '.join(OPS)}; default allreduce")
    parser.add_argument("--sizes", nargs="+", metavar="BYTES", default=[SIZES],
                        help="bytes of the larger of a rank's input and output; K, M, G: powers of 1024; default "
                             f"{SIZES}")
    parser.add_argument("--dtype", choices=list(ITEM_NBYTES), default="float32", help="default float32")
    parser.add_argument("--backends", nargs="+", metavar="NAME",
                        help="of bagua, gloo (torch.distributed) and mpi (mpi4py); default all, in a job bagua")
    parser.add_argument("--rounds", type=positive, metavar="R", default=3,
                        help="rounds per backend, each in new processes; default 3")
    parser.add_argument("--iterations", type=positive, metavar="I",
                        help="timed calls per size and round; default by size")
    parser.add_argument("--algorithm", metavar="NAME",
                        help=f"bagua's allreduce by an algorithm: {', '.join(algorithms.names())}")
    parser.add_argument("--many", action="store_true",
                        help="161 gradients of the sizes of ResNet-50's: all posted one by one, then waited for")
    parser.add_argument("--json", metavar="FILE", help="also write everything, samples included, to this file")
    return parser


def parse_options(arguments: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None,
                  check: Callable[[argparse.Namespace], object] | None = None) -> argparse.Namespace:
    """Parses and checks the options. Wrong ones end the process with one sentence and exit code 2.

    Args:
        parser: build_parser()'s with more options; None: without more.
        check: called with the options before all other checks; raises ValueError.
    """
    parser = parser or build_parser()
    options = parser.parse_args(arguments)
    try:
        if check:
            check(options)
        _check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def job_size() -> int | None:
    """Number of ranks of this process's job; None outside a job."""
    return variables.read("HOROVOD_SIZE") if variables.given("HOROVOD_SIZE") else None


def set_ranks(options: argparse.Namespace) -> None:
    """Sets options.np if it is not given. ValueError: this job has another size."""
    size = job_size()
    if size and options.np not in (None, size):
        raise ValueError(f"-np {options.np}, but this is a job of {size} ranks: leave out -np, or baguarun")
    options.np = size or options.np or 2


def _check(options):
    set_ranks(options)
    size = job_size()
    if options.op is None:
        options.op = [] if options.many else ["allreduce"]
    else:
        options.op = _known("--op", options.op, OPS)
    options.sizes = list(map(_size, _listed(options.sizes)))
    options.backends = _known("--backends", options.backends or (["bagua"] if size else BACKENDS), BACKENDS)
    if size and "mpi" in options.backends:
        raise ValueError("--backends mpi: not in a running job; run `python -m bagua_hvd.bench` without baguarun")
    if options.algorithm:
        _check_relaxed(options)
    if options.json:
        folder = os.path.dirname(options.json) or "."
        if not os.access(folder, os.W_OK) or os.path.isdir(options.json):
            raise ValueError(f"{options.json!r} cannot be written")


def _check_relaxed(options):
    if options.op != ["allreduce"] or options.many:
        raise ValueError("--algorithm is for allreduce only: leave out --many and other --op")
    algorithm = algorithms.get(options.algorithm)
    if type(algorithm).communicate is algorithms.Algorithm.communicate:
        raise ValueError(f"--algorithm {options.algorithm} does not communicate gradients: it has no allreduce")
    if not (algorithm.takes(getattr(native, options.dtype.upper())) and options.dtype.startswith(("float", "bfloat"))):
        raise ValueError(f"--algorithm {options.algorithm} does not take {options.dtype}")


def _label(name, options):
    """The backend's name in the table."""
    return f"bagua:{options.algorithm}" if name == "bagua" and options.algorithm else name


def _measure_fresh(options, where, guard):
    """The result of rounds.interleaved(), with fresh ranks for each round."""
    names = []
    for name in options.backends:
        why = rounds.why_left_out(name, options)
        if why:
            print(f"note: {name} is left out: {why}.")
        else:
            names.append(name)
    return rounds.interleaved(names, options, lambda name: rounds.slowest(rounds.run_round(name, options, where)),
                              guard)


def measure_and_print(options: argparse.Namespace, where: Any = None, described: str = "",
                      guard: rounds.Guard | None = None) -> tuple[Results, Others]:
    """Measures and prints the table. Returns the result of rounds.interleaved(), by the names in the table.

    Args:
        where: the hosts argument of rounds.run_round(). described: its description, for the line above the table.
        guard: see rounds.interleaved(); not in a running job, whose ranks must all measure the same rounds.
    """
    in_job = job_size() is not None
    speaks = job_rank() == 0
    facts = report.machine()
    if speaks:
        print(report.machine_line(facts) + "\n" + report.method_line(options, in_job, described), flush=True)
    results, others = (rounds.in_job(options, functools.partial(measure, options=options)) if in_job else
                       _measure_fresh(options, where, guard))
    results = {_label(name, options): times for name, times in results.items()}
    others = {_label(name, options): used for name, used in others.items()}
    rows = report.rows(results, cases(options, options.np), options.np)
    if speaks:
        print("\n" + report.table(report.COLUMNS, [row.cells() for row in rows], left=3), flush=True)
        if busy := report.others_line(others):
            print("\n" + busy, flush=True)
        if options.json:
            report.write_json(options.json, facts, options, rows, others)
    return results, others


def _stop(signum, frame):
    sys.exit(128 + signum)


def run(work: Callable[..., object], *arguments: object) -> int:
    """Calls work(*arguments) as a program. Returns the exit code; signals end the process."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        work(*arguments)
    except KeyboardInterrupt:
        print("bench: stopped by SIGINT.", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        sentence = str(error) if isinstance(error, rounds.RoundFailed) else describe(error)
        print(f"bench: error: {sentence}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(measure_and_print, parse_options()))
