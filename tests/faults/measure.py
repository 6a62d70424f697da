"""The table of docs/results/faults.md: every fault, many times, at seeded times. Needs root, iproute2 and gcc.

    python tests/faults/measure.py [--repetitions 20] [--limit 10] [--parallel 4] [--seed 0] [--only TEXT]

Exits with 1 if a job hung, had a wrong result, or ended in any other unexpected state.
"""
import argparse
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]

from faults import FAULTS  # noqa: E402
from job import SIZE, make_zygote  # noqa: E402
from network import Network  # noqa: E402
from trial import run  # noqa: E402


def check_time(fault, outcome, limit):
    """Adds a problem if the outcome took longer than allowed."""
    allowed = fault.within(limit)
    if outcome.seconds is not None and outcome.seconds > allowed:
        outcome.problems.append(f"{outcome.seconds:.1f} s until all knew, more than {allowed:g}")


def measure(fault, options, folder, network, zygote):
    """Runs the fault `options.repetitions` times, `options.parallel` at a time. Returns the Outcomes."""
    def lane(number):
        links = network.links[SIZE * number:SIZE * (number + 1)] if network else None
        outcomes = []
        for seed in range(options.seed + number, options.seed + options.repetitions, options.parallel):
            if interrupted.is_set():
                break
            place = folder / f"{FAULTS.index(fault)}.{seed}"
            place.mkdir()
            outcomes.append(run(fault, place, zygote, seed, options.limit, links))
            check_time(fault, outcomes[-1], options.limit)
            for problem in outcomes[-1].problems:
                print(f"{fault.name}, seed {seed}: {problem}", file=sys.stderr, flush=True)
        return outcomes

    interrupted = threading.Event()
    with ThreadPoolExecutor(options.parallel) as pool:
        try:
            return [outcome for outcomes in pool.map(lane, range(options.parallel)) for outcome in outcomes]
        except BaseException:
            interrupted.set()       # the running jobs end, and clean up
            raise


def line(fault, outcomes, limit):
    """A row of the table."""
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    found = "- | - | -"
    if seconds:
        found = f"{statistics.median(seconds):.2f} | {max(seconds):.2f} | {fault.within(limit):g}"
    bad = sum(bool(outcome.problems) for outcome in outcomes)
    sees = next((outcome.message for outcome in outcomes if outcome.message), "the job goes on")
    return (f"| {fault.name} | {len(outcomes)} | {found} | {sum(outcome.hang for outcome in outcomes)} | "
            f"{sum(outcome.wrong for outcome in outcomes)} | {bad} | {sees} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--limit", type=float, default=10, help="the job's two limits, in seconds")
    parser.add_argument("--parallel", type=int, default=4, help="jobs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose names contain this")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if options.only in fault.name]
    needs_hosts = any(fault.hosts for fault in chosen)
    began, bad = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder, \
            Network(SIZE * options.parallel) if needs_hosts else nullcontext() as network:
        zygote = make_zygote(folder)
        print("| fault | runs | median s | max s | allowed s | hangs | wrong sums | other trouble | a survivor sees |\n"
              "|---|---|---|---|---|---|---|---|---|")
        for fault in chosen:
            outcomes = measure(fault, options, Path(folder), network, zygote)
            bad += any(outcome.problems for outcome in outcomes)
            print(line(fault, outcomes, options.limit), flush=True)
    print(f"\n{options.repetitions} repetitions from seed {options.seed} on, limits {options.limit:g} s, "
          f"{options.parallel} at a time, {time.monotonic() - began:.0f} s in all", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
