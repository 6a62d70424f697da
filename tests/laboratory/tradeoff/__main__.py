"""The gain of each algorithm: time per step, bytes, time to quality, on one network and over all of them.

    python -m tests.laboratory.tradeoff --hosts 4 --rate 1gbit --delay 5                 as root: measured
    python -m tests.laboratory.tradeoff --predict --hosts 8 --parameters 110e6 --step-ms 200 --output FOLDER
    python -m tests.laboratory.tradeoff --small --output FOLDER                          minutes, a small model

Measured: step_times.py, real communication of ranks that sleep instead of computing. Predicted: bench/predict.py. The
map is always a prediction: for each bandwidth and latency the least relaxed configuration within 10 % of the fastest.
Time to quality is the time per step, times the number of needed steps relative to gradient_allreduce (records
"quality"), of which exact ones take as long as those of "bytegrad, float8".

With --pictures it draws the documentation's pictures from its records.
"""
import argparse
import importlib.util
import math
import statistics
import sys
from pathlib import Path

from bagua_hvd.bench import predict, report
from bagua_hvd.bench.predict import bytes_per_s
from tests.laboratory import profiles, step_times
from tests.laboratory.hosts import why_impossible
from tests.laboratory.tradeoff import predicted
from tests.laboratory.tradeoff.pictures import draw_documentation, draw_steps, row_of
from tests.laboratory.tradeoff.to_quality import exact_way, relative_time
from tests.laboratory.tradeoff.winners import draw_map, winner

SMALL = ("none", "gradient_allreduce", "bytegrad", "bytegrad, float8", "async")
COLUMNS = ("way", "ms per step", "shortest to longest", "MB sent", "speed", "to quality")


def _measure(options, profile):
    folder = options.output or "."
    ways = {label: step_times.WAYS[label] for label in options.ways}
    found = step_times.run(options.hosts, options.rate, options.delay, ways, profile.model,
                           seconds=options.seconds, experiment="tradeoff", folder=folder, profile=profile)
    for record in found:
        if why := step_times.why_not(record):
            print(f"{record.setting['way']}: not measurable here ({why})", flush=True)
        else:
            yield row_of(record)


def _predicted(options, profile):
    network = predict.Network(options.hosts, bytes_per_s(options.rate), options.delay / 1e3)
    for way in options.ways:
        milliseconds = 1e3 * predicted.step_s(way, profile, network)
        said = predicted.sends(way, network.hosts, profile.parameters, predict.thin(profile))
        yield way, milliseconds, milliseconds, milliseconds, said.nbytes / said.period


def _lines(rows):
    """rows: (configuration, ms, shortest, longest, bytes)."""
    known = {way: middle for way, middle, *_ in rows}
    base = known.get("gradient_allreduce")
    for way, middle, low, high, sent in rows:
        times = relative_time(way, middle, known.get(exact_way(way)), base) if base else None
        yield (way, f"{middle:.1f}", f"{low:.1f} to {high:.1f}", f"{sent / 1e6:.2f}",
               f"{base / middle:.2f}x" if base else "-",
               "?" if times is None else f"{1 / times:.2f}x" if times < math.inf else "never")


def main(arguments=None):
    """Runs the program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.laboratory.tradeoff", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it; default 1gbit")
    parser.add_argument("--delay", type=float, default=0.0, metavar="MS", help="one way; default 0")
    parser.add_argument("--model", default="resnet18", choices=profiles.MODELS, help="default resnet18")
    parser.add_argument("--parameters", type=float, help="instead: so many, in 50 layers")
    parser.add_argument("--step-ms", type=float, default=100.0, help="of these: what a step computes; default 100")
    parser.add_argument("--ways", nargs="+", default=list(step_times.WAYS), choices=step_times.WAYS, metavar="WAY",
                        help="; ".join(step_times.WAYS).replace("%", "%%"))
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement, about; default 4")
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("--small", action="store_true", help=f"2 hosts, a million parameters, {', '.join(SMALL)}")
    parser.add_argument("--output", metavar="FOLDER", help="for pictures and records")
    parser.add_argument("--pictures", action="store_true", help="draw those of the documentation, and nothing else")
    options = parser.parse_args(arguments)
    if (options.pictures or options.output) and importlib.util.find_spec("matplotlib") is None:
        parser.error("pictures need matplotlib: install it, or leave out --output and --pictures")
    if options.pictures:
        draw_documentation()
        return 0
    if options.small:
        options.hosts, options.parameters, options.step_ms, options.seconds = 2, 1e6, 20.0, 0.3
        options.ways = list(SMALL)
    if not options.predict and (problem := why_impossible()):
        parser.error(problem + ", or give --predict")
    profile = (predict.even_profile(options.parameters, options.step_ms / 1e3) if options.parameters
               else profiles.load(options.model))
    rows = list((_predicted if options.predict else _measure)(options, profile))
    how = "predicted" if options.predict else "measured"
    print(f"\n{profile.parameters / 1e6:.1f} M parameters, {1e3 * profile.computing_s:.0f} ms of computing, "
          f"{options.hosts} hosts, {options.rate}, {options.delay:g} ms one way: {how}\n")
    print(report.table(COLUMNS, list(_lines(rows)), left=1))
    network = predict.Network(options.hosts, bytes_per_s(options.rate), options.delay / 1e3)
    print(f"\nthe least relaxed within 10 % of the quickest, predicted: {winner(profile, network)}")
    if not options.predict and rows:
        errors = [abs(1e3 * predicted.step_s(row[0], profile, network) / row[1] - 1) for row in rows]
        print(f"error of the prediction, median: {100 * statistics.median(errors):.0f} %")
    if options.output:
        Path(options.output).mkdir(parents=True, exist_ok=True)
        draw_steps(Path(options.output, "step_times.png"), {how: rows})
        draw_map(Path(options.output, "map.png"), [profile], options.hosts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
