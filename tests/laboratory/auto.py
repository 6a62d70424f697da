"""Compares the choice of `auto` on a network with every plan: is it the fastest, and never slower than full gradients?

    python -m tests.laboratory.auto --hosts 2 4 8 --rate 100mbit 1gbit --delay 0 5 20         as root
    python -m tests.laboratory.auto --hosts 1 --per-host 2                                    one host

Uses the ranks of step_times.py: they sleep instead of computing, but their communication is real. Times each plan,
pinned, and then `auto` after it has settled: alone, where it may change the buckets, and up to E1, where it may use
codecs without error feedback. Appends records "choice"; cells with a valid record are not measured again.
"""
import argparse
import itertools
import sys
import time

from bagua_hvd.algorithms import auto
from bagua_hvd.bench import report
from bagua_hvd.core.variables import MIB
from tests.laboratory import profiles, records, step_times
from tests.laboratory.hosts import why_impossible

EXPERIMENT = "choice"
MODELS = "mobilenet", "gru", "transformer256"
UP_TO, WINDOW = "E1", 4
ALLOWED = 1.1               # of the best plan's time
SLOWER = 1.03               # than gradient_allreduce
EXACT = "gradient_allreduce"
BOTH = {"auto": "E0", "auto, up to E1": UP_TO}


def plans():
    """{label: (algorithm, bytes of a bucket)} of all plans."""
    return {name if size is None else f"{name}, {size // MIB} MiB": (name, size)
            for name in auto.Auto(up_to=UP_TO).algorithms for size in auto.BUCKET_BYTES}


def ways():
    """The configurations for step_times.run()."""
    pinned = {label: ("auto", {"up_to": UP_TO, "plan": {"algorithm": name, "bucket_bytes": size}}, 1)
              for label, (name, size) in plans().items()}
    # The exact algorithm with default buckets, as users have it without auto.
    return {**pinned, EXACT: (EXACT, {}, 1),
            **{label: ("auto", {"up_to": up_to, "window": WINDOW}, 1) for label, up_to in BOTH.items()}}


def chosen(record):
    """The label of the plan in use."""
    place, size = record.samples["plan"].values
    names = list(auto.Auto(up_to=BOTH[record.setting["way"]]).algorithms)
    return next(label for label, plan in plans().items() if plan == (names[int(place)], int(size) or None))


def _cells(per_host=1):
    """[((model, hosts, rate, delay), {configuration: record})] of all measurements."""
    settings = dict.fromkeys(
        (record.setting["model"], record.setting["hosts"], record.setting["rate"], record.setting["delay_ms"])
        for record in records.read(EXPERIMENT, per_host=per_host))
    return [(setting, step_times.newest(EXPERIMENT, per_host=per_host, **dict(zip(
        ("model", "hosts", "rate", "delay_ms"), setting, strict=True)))) for setting in sorted(settings)]


def _compared(per_host=1):
    """(setting, configuration of auto, its record, its best permitted plan, auto's time relative to that plan's, to
    gradient_allreduce's). The last three are None if a record does not count.
    """
    for setting, found in _cells(per_host):
        for label in BOTH:
            mine, exact = found.get(label), found.get(EXACT)
            if mine is None:
                continue
            names = auto.Auto(up_to=BOTH[label]).algorithms
            rivals = {each: found[each] for each, (name, _) in plans().items() if name in names and each in found}
            if step_times.why_not(mine) or exact is None or step_times.why_not(exact):
                yield setting, label, mine, None, None, None
                continue
            times = {each: step_times.ms(record) for each, record in rivals.items() if not step_times.why_not(record)}
            best = min([*times, EXACT], key=lambda each: times.get(each, step_times.ms(exact)))
            took = step_times.ms(mine)
            yield setting, label, mine, best, took / times.get(best, step_times.ms(exact)), took / step_times.ms(exact)


def _label(way):
    """Converts a label without spaces, as in pages, to that of the records."""
    return way.replace("+", ", ").replace("_", " ")


def exceptions(way, per_host="1"):
    """Cells where auto exceeded its limit relative to its best permitted plan, or that could not be measured."""
    way = _label(way)
    lines = []
    for (model, hosts, rate, delay), label, mine, best, to_best, _ in _compared(int(per_host)):
        if label == way and (best is None or to_best > ALLOWED):
            found = [f"not measurable ({step_times.why_not(mine) or EXACT})", "", ""] if best is None else [
                f"{to_best:.2f}", chosen(mine), best]
            lines.append((f"`{model}`", str(hosts), rate, f"{delay:g} ms", *found))
    head = "model", "hosts", "rate", "delay", "to the best", "auto used", "the best"
    return report.table(head, lines, left=1) if lines else "None."


def counted(way, against="best", per_host="1"):
    """The number of cells in which auto was within its limit, of those that count."""
    way = _label(way)
    column, limit = (4, ALLOWED) if against == "best" else (5, SLOWER)
    ratios = [row[column] for row in _compared(int(per_host)) if row[1] == way and row[3] is not None]
    return f"{sum(ratio <= limit for ratio in ratios)} of {len(ratios)}" if ratios else "none"


def worst(way, against="best", per_host="1"):
    """The largest ratio of the cells that count."""
    way = _label(way)
    ratios = [row[4 if against == "best" else 5] for row in _compared(int(per_host)) if row[1] == way and row[3]]
    return f"{max(ratios):.2f}" if ratios else "?"


def main(arguments=None):
    """Runs the program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.laboratory.auto", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=profiles.MODELS)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--per-host", type=int, default=1, help="ranks; default 1")
    parser.add_argument("--rate", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--delay", nargs="+", type=float, default=[0.0], metavar="MS", help="one way; default 0")
    parser.add_argument("--ways", nargs="+", default=list(ways()), choices=ways(), metavar="WAY",
                        help="; ".join(ways()))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each way, about; default 2")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no network begins")
    parser.add_argument("--again", action="store_true", help="also what has a record that counts")
    parser.add_argument("--folder", default=records.FOLDER, help="of the records")
    options = parser.parse_args(arguments)
    if problem := why_impossible():
        parser.error(problem)
    until = time.monotonic() + 60 * options.minutes
    for model in options.models:
        profile = profiles.load(model)
        for count, rate, delay in itertools.product(options.hosts, options.rate, options.delay):
            if time.monotonic() > until:
                return 0
            found = {} if options.again else step_times.newest(
                EXPERIMENT, options.folder, per_host=options.per_host, model=model, hosts=count, rate=rate,
                delay_ms=delay)
            missing = {label: way for label, way in ways().items() if label in options.ways and not (
                label in found and not step_times.why_not(found[label]))}
            if not missing:
                continue
            for record in step_times.run(
                    count, rate, delay, missing, model, options.per_host, seconds=options.seconds,
                    experiment=EXPERIMENT, folder=options.folder, profile=profile):
                said = record.setting["way"]
                print(f"{model}, {count} hosts, {rate}, {delay:g} ms, {said:28}{step_times.ms(record):9.1f} ms "
                      f"{step_times.why_not(record)} {chosen(record) if said in BOTH else ''}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
