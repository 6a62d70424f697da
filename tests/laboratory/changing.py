"""How `auto` reacts when the network changes during a run: its new plan, when, on which ranks, and the gain.

    python -m tests.laboratory.changing --rates 1gbit 100mbit 1gbit         as root

One job, with the sleeping ranks of step_times.py and real communication, trains up to E1 while the rate of all links
changes between two steps. Appends records "changing": every step of every rank, with the plan in use. The result of
each rate's phase is compared with the fastest plan that bench.auto has pinned at that rate.
"""
import argparse
import statistics
import sys

from bagua_hvd.algorithms.auto import WINDOW, Auto
from bagua_hvd.bench import report
from tests.laboratory import auto, profiles, records, step_times
from tests.laboratory.emulated import Ranks
from tests.laboratory.hosts import Hosts, why_impossible

EXPERIMENT = "changing"
STEPS = 150                 # with each rate: from the second one on, longer than hysteresis keeps a plan
SETTLED = 0.5               # the share of a phase's steps, at its end, that count as settled


def measure(model, hosts_count, rates, delay, steps, window, folder=records.FOLDER):
    """The record of one job."""
    profile = profiles.load(model)
    places = list(auto.plans().values())
    names = list(Auto(up_to=auto.UP_TO).algorithms)
    with Hosts(hosts_count, rates[0], delay) as hosts, Ranks(hosts, profile) as ranks:
        arguments = {"up_to": auto.UP_TO, **({"window": window} if window else {})}
        ranks.call("prepare", 1, each=[("auto", arguments, 1)] * ranks.size)
        phases = []
        for rate in rates:
            hosts.change(rate=rate, delay=float(delay))
            phases.append(ranks.call("watch", steps))
    samples = {}
    for rank in range(hosts_count):
        made = [step for phase in phases for step in phase[rank]]
        samples[f"plan of rank {rank}"] = "place", [
            places.index((names[place], size or None)) for (place, size), _ in made]
        samples[f"step of rank {rank}"] = "s", [seconds for _, seconds in made]
    setting = {"model": model, "hosts": hosts_count, "rates": rates, "delay_ms": delay, "steps": steps,
               "window": window or WINDOW}
    return records.append(EXPERIMENT, setting, samples, folder=folder)


def plans(record):
    """The first rank's label of the plan in use in each step."""
    labels = list(auto.plans())
    return [labels[int(place)] for place in record.samples["plan of rank 0"].values]


def alike(record):
    """Whether all ranks had the same plan in every step."""
    used = [samples.values for name, samples in record.samples.items() if name.startswith("plan of rank")]
    return all(each == used[0] for each in used)


def switches(record):
    """[(steps made before, the plan from then on)]."""
    used = plans(record)
    return [(step, plan) for step, (plan, before) in enumerate(zip(used[1:], used, strict=False), 1) if plan != before]


def settled_ms(record, phase):
    """The median step of the slowest rank, over the last steps with one rate."""
    steps = record.setting["steps"]
    first = phase * steps + round((1 - SETTLED) * steps)
    return 1e3 * statistics.median(step_times.slowest(record)[first:(phase + 1) * steps])


def _best(setting, rate):
    """(milliseconds, label) of the fastest plan pinned at this rate; None: none counts."""
    pinned = step_times.newest(auto.EXPERIMENT, per_host=1, model=setting["model"], hosts=setting["hosts"], rate=rate,
                               delay_ms=setting["delay_ms"])
    times = [(step_times.ms(pinned[label]), label) for label in auto.plans()
             if label in pinned and not step_times.why_not(pinned[label])]
    return min(times, default=None)


def _newest():
    """The newest record of each setting."""
    found = {repr(sorted(record.setting.items())): record for record in records.read(EXPERIMENT)}
    return sorted(found.values(), key=lambda record: (record.setting["model"], record.setting["hosts"],
                                                      record.setting["rates"], record.setting["delay_ms"]))


def table():
    """For each job its switches and, with each rate, the time of a step and that of the fastest pinned plan."""
    found, rows = _newest(), []
    for record in found:
        said, cells = record.setting, []
        for phase, rate in enumerate(said["rates"]):
            best, took = _best(said, rate), settled_ms(record, phase)
            cells.append(f"{took:.0f}" + (f" to {best[0]:.0f} ({took / best[0]:.2f})" if best else ""))
        changes = "; ".join(f"{step}: {plan}" for step, plan in switches(record)) or "-"
        rows.append((f"`{said['model']}`", f"{said['delay_ms']:g}", changes, *cells))
    if not found:
        return "Nothing measured yet."
    (hosts, *rates), = {(record.setting["hosts"], *record.setting["rates"]) for record in found}      # of all jobs
    return report.table((f"{hosts} hosts", "ms away", "switches, after steps", *rates), rows, left=1)


def alike_on_all_ranks():
    """The number of jobs in which all ranks switched in the same step."""
    found = _newest()
    return f"{sum(map(alike, found))} of {len(found)}"


def most_switches():
    """The largest number of switches in one job."""
    return str(max((len(switches(record)) for record in _newest()), default=0))


def main(arguments=None):
    """Runs the program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.laboratory.changing", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(auto.MODELS), choices=profiles.MODELS)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit", "1gbit"], help="one after the other")
    parser.add_argument("--delay", type=float, default=0.0, metavar="MS", help="one way; default 0")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"with each rate; default {STEPS}")
    parser.add_argument("--window", type=int, default=auto.WINDOW, help=f"of auto; default {auto.WINDOW}")
    parser.add_argument("--folder", default=records.FOLDER, help="of the records")
    options = parser.parse_args(arguments)
    if problem := why_impossible():
        parser.error(problem)
    for model in options.models:
        for count in options.hosts:
            record = measure(model, count, options.rates, options.delay, options.steps, options.window, options.folder)
            came = ", ".join(f"{rate} {settled_ms(record, phase):.1f} ms" for phase, rate in enumerate(options.rates))
            print(f"{model}, {count} hosts: {came}; {switches(record)}; alike: {alike(record)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
