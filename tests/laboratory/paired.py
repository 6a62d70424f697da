"""Is `auto` ever slower than exact averages? Alternates both in one job, often enough to show small differences.

    python -m tests.laboratory.paired                                               as root: two ranks of one host
    python -m tests.laboratory.paired --hosts 2 --per-host 1 --rate 1gbit           another network

Uses the ranks of step_times.py: they sleep instead of computing, but their communication is real. Each turn makes a new
optimizer, lets it settle as bench.auto does, and times some steps; every other turn has the opposite order. Appends
records "paired": the median step of each turn.
"""
import argparse
import statistics
import sys

from bagua_hvd.bench import report
from tests.laboratory import auto, profiles, records, step_times
from tests.laboratory.emulated import Ranks
from tests.laboratory.hosts import Hosts, why_impossible

EXPERIMENT = "paired"
WAYS = (auto.EXACT, *auto.BOTH)
TURNS, STEPS = 12, 30


def measure(model, hosts_count, per_host, rate, turns, steps, folder=records.FOLDER):
    """The record of one job."""
    ways = auto.ways()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with Hosts(hosts_count, rate) as hosts, Ranks(hosts, profiles.load(model), per_host) as ranks:
        for turn in range(turns):
            for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
                trains, arguments, _ = ways[way]
                ranks.call("prepare", step_times.SETTLES, each=[(trains, arguments, 1)] * ranks.size)
                found = ranks.call("measure", steps, 0)
                slowest = map(max, zip(*(rank["steps"] for rank in found), strict=True))
                seconds[way].append(statistics.median(slowest))
    setting = {"model": model, "hosts": hosts_count, "per_host": per_host, "rate": rate, "turns": turns, "steps": steps}
    return records.append(EXPERIMENT, setting, {way: ("s", values) for way, values in seconds.items()}, folder=folder)


def ratios(record, way):
    """A configuration's time relative to exact averages, in each turn."""
    return [mine / exact for mine, exact in zip(record.samples[way].values, record.samples[auto.EXACT].values,
                                                strict=True)]


def _newest(hosts):
    found = {(record.setting["model"], record.setting["per_host"], record.setting["rate"]): record
             for record in records.read(EXPERIMENT, hosts=hosts)}
    return dict(sorted(found.items()))


def _quarters(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def table(hosts="1"):
    """Medians, and the middle half of the turns; exact averages against themselves show the noise between two turns."""
    rows = []
    for (model, per_host, _), record in _newest(int(hosts)).items():
        exact = record.samples[auto.EXACT].values
        noise = [after / before for before, after in zip(exact, exact[1:], strict=False)]
        rows.append((f"`{model}`, {per_host * int(hosts)} ranks", f"{1e3 * statistics.median(exact):.1f}",
                     _quarters(noise), *(_quarters(ratios(record, way)) for way in WAYS[1:])))
    if not rows:
        return "Nothing measured yet."
    turns = " or ".join(map(str, sorted({len(record.samples[auto.EXACT].values)
                                         for record in _newest(int(hosts)).values()})))
    return report.table((f"{turns} turns", "exact, ms a step", "exact to the turn before",
                         *(f"{way} to exact" for way in WAYS[1:])), rows, left=1)


def worst(hosts="1"):
    """The largest median ratio."""
    found = [statistics.median(ratios(record, way)) for record in _newest(int(hosts)).values() for way in WAYS[1:]]
    return f"{max(found):.3f}" if found else "?"


def main(arguments=None):
    """Runs the program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.laboratory.paired", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(auto.MODELS), choices=profiles.MODELS)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--per-host", type=int, default=2, help="ranks; default 2")
    parser.add_argument("--rate", default="none", help="of the links between hosts; default none: as fast as they are")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"default {TURNS}")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"that are timed in each; default {STEPS}")
    parser.add_argument("--folder", default=records.FOLDER, help="of the records")
    options = parser.parse_args(arguments)
    if problem := why_impossible():
        parser.error(problem)
    for model in options.models:
        record = measure(model, options.hosts, options.per_host, options.rate, options.turns, options.steps,
                         options.folder)
        print(model, {way: _quarters(ratios(record, way)) for way in WAYS[1:]}, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
