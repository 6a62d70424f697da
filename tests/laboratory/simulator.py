"""Predicts allreduces between hosts: the core simulates all ranks' schedules (native/simulation).

    python -m tests.laboratory.simulator --hosts 2 4 --rate 100mbit 1gbit --latency 0 5 20 --sizes 4 65536 1048576

A time includes one operation and its negotiation. --measure also measures them on this machine's emulated hosts with
such a network (root), and appends a record "allreduce" for each cell; the page of results shows both.
"""
import argparse
import os
import statistics
import sys
import time

from bagua_hvd.bench import report
from bagua_hvd.bench.predict import bytes_per_s
from bagua_hvd.bench.rank import human_nbytes
from tests.laboratory import records
from tests.laboratory.emulated import Ranks
from tests.laboratory.hosts import Hosts, why_impossible
from tests.laboratory.simulation import PATHS, Network, allreduces
from tests.laboratory.step_times import BUSY

NEAR = 0.25
WARMUP, COUNT = 4, 7
APART_SECONDS = 0.05


def _simulated(hosts, rate, latency, nbytes, message_us=0.0, path="chosen"):
    """The slowest rank's seconds."""
    network = Network(latency * 1e-3, bytes_per_s(rate), message_s=message_us * 1e-6)
    return max(allreduces(hosts, [nbytes], network, path))


def measure(hosts, rate, latency, sizes, folder=records.FOLDER):
    """Yields a record for each size. All ranks start an allreduce at a given time of the machine's clock."""
    with Hosts(hosts, rate, latency) as where, Ranks(where, None) as ranks:
        for nbytes in sizes:
            expected = _simulated(hosts, rate, latency, nbytes)
            every = 1.5 * expected + APART_SECONDS
            where.carrier.report()
            reported = time.monotonic()
            found = ranks.call("allreduces", nbytes, reported + 0.1, every, COUNT, WARMUP)
            carried = where.carrier.report()
            slowest = [max(times) for times in zip(*(times for times, _ in found), strict=True)]
            carrying = carried.share * (time.monotonic() - reported) * COUNT / (COUNT + WARMUP)
            processor = (sum(used for _, used in found) + carrying) / sum(slowest)
            yield records.append("allreduce", {"hosts": hosts, "rate": rate, "delay_ms": latency, "nbytes": nbytes}, {
                "measured": ("s", slowest),
                "simulated": ("s", [expected]),
                "processor": ("of all cores, while one was under way", [processor / len(os.sched_getaffinity(0))]),
                "dropped": ("packets", [carried.dropped]),
            }, folder=folder)


def _middle(record, name):
    return statistics.median(record.samples[name].values)


def is_near(record):
    """Whether the simulation is within a quarter of the measurement; None: limited by the CPU, or by lost packets."""
    if record.samples["processor"].values[0] > BUSY or record.samples["dropped"].values[0]:
        return None
    return abs(_middle(record, "simulated") / _middle(record, "measured") - 1) <= NEAR


def _newest():
    found = {}
    for record in records.read("allreduce"):
        found[tuple(record.setting.values())] = record
    return found


def beside(hosts="8"):
    """A table: measured / simulated milliseconds of the newest records, by network (rows) and size (columns)."""
    newest = {key: record for key, record in _newest().items() if record.setting["hosts"] == int(hosts)}
    sizes = sorted({record.setting["nbytes"] for record in newest.values()})
    lines: dict[tuple, dict] = {}
    for record in newest.values():
        setting = record.setting
        network = bytes_per_s(setting["rate"]) * 8e-6, setting["delay_ms"]
        mark = {True: "", False: " *", None: " -"}[is_near(record)]
        lines.setdefault(network, {})[setting["nbytes"]] = (
            f"{_middle(record, 'measured') * 1e3:.1f} / {_middle(record, 'simulated') * 1e3:.1f}{mark}")
    rows = [(f"{rate:g}", f"{delay:g}", *(cells.get(nbytes, "") for nbytes in sizes))
            for (rate, delay), cells in sorted(lines.items())]
    return report.table(("Mbit/s", "one way, ms", *map(human_nbytes, sizes)), rows, left=0)


def counted():
    """A sentence with the number of cells that are near."""
    verdicts = [is_near(record) for record in _newest().values()]
    return f"{verdicts.count(True)} of {len(verdicts) - verdicts.count(None)}"


def main(arguments=None):
    """Runs the program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.laboratory.simulator", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rate", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--latency", nargs="+", type=float, default=[0, 5, 20], metavar="MS", help="one way")
    parser.add_argument("--sizes", nargs="+", type=int, default=[4, 1 << 16, 1 << 20, 1 << 24], help="bytes")
    parser.add_argument("--message", type=float, default=0, metavar="US", help="of a core, for a message, at both ends")
    parser.add_argument("--path", choices=PATHS, default="chosen")
    parser.add_argument("--measure", action="store_true", help="too; --path and --message are the core's then")
    parser.add_argument("--folder", default=records.FOLDER, help="of the records")
    options = parser.parse_args(arguments)
    if options.measure and (problem := why_impossible()):
        parser.error(problem)
    lines = []
    for hosts in options.hosts:
        for rate in options.rate:
            for latency in options.latency:
                if options.measure:
                    for record in measure(hosts, rate, latency, options.sizes, options.folder):
                        print(f"{hosts} hosts, {rate}, {latency:g} ms, {record.setting['nbytes']:9} B: measured "
                              f"{_middle(record, 'measured') * 1e3:.3f} ms, simulated "
                              f"{_middle(record, 'simulated') * 1e3:.3f}, processor "
                              f"{record.samples['processor'].values[0]:.0%}", flush=True)
                    continue
                times = (_simulated(hosts, rate, latency, nbytes, options.message, options.path)
                         for nbytes in options.sizes)
                lines.append((str(hosts), rate, f"{latency:g}", *(f"{time * 1e3:.3f}" for time in times)))
    if options.measure:
        return 0
    columns = "hosts", "rate", "latency ms", *(f"{nbytes} B, ms" for nbytes in options.sizes)
    print(report.table(columns, lines, left=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
