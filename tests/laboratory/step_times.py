"""Time and bytes of a training step, by algorithm and network: ranks sleep instead of computing, but communicate.

    python -m tests.laboratory.step_times --hosts 2 4 8 --rate 100mbit 1gbit --delay 0 --ways bytegrad ddp

Appends a record "step" for each cell; needs root, /dev/net/tun and a profile of the model (profiles.py). A cell counts
if the machine did not affect it: CPU and packet carrier were busy for less than 70 % of the time, no thread waited for
the CPU for more than half of it, plain TCP had just reached 95 % of the link's capacity, and the median step, of the
slowest rank in each, was at most 1.25 times the shortest. Other cells are tried again, and are reported as not
measurable if they still do not count.
"""
import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping

# Set before any library reads it; all ranks are children of this process.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

from bagua_hvd.bench.predict import bytes_per_s  # noqa: E402
from tests.laboratory import plain, profiles, records  # noqa: E402
from tests.laboratory.emulated import Ranks  # noqa: E402
from tests.laboratory.hosts import Hosts, why_impossible  # noqa: E402

BUSY, QUEUED, REACHED, STEADY = 0.7, 0.5, 0.95, 1.25
SETTLES = 60                    # steps for `auto` to choose a plan and to confirm it, with a window of 4
TRIES = 2
DATA = 1448 / 1514              # share in a full frame
WARM = {"warmup_steps": 1}
# label: (algorithm, its arguments, steps in a period). Warm-ups last for one step, which is not measured. A missing
# argument in a label has the default at the time of its first measurement; a codec: its function in codecs, and its
# arguments.
Ways = Mapping[str, tuple[str, dict, int]]
WAYS: dict[str, tuple[str, dict, int]] = {
    "none": ("none", {}, 1), "ddp": ("ddp", {}, 1), "ddp, fp16 hook": ("ddp_fp16", {}, 1),
    "ddp, PowerSGD hook": ("ddp_powersgd", {}, 1),
    **{name: (name, {}, 1) for name in ("gradient_allreduce", "bytegrad", "rotated")},
    **{f"{name}, delay": (name, {"delay": 1}, 1) for name in ("gradient_allreduce", "bytegrad")},
    **{f"bytegrad, block({bits})": ("bytegrad", {"codec": ["block", bits]}, 1) for bits in (8, 4)},
    "bytegrad, float8": ("bytegrad", {"codec": ["float8"]}, 1),
    "bytegrad, float8, Adam": ("bytegrad", {"codec": ["float8"], "optimizer": "adam"}, 1),
    **{name: (name, WARM, 1) for name in ("doublesqueeze", "topk")},
    "doublesqueeze, block(4)": ("doublesqueeze", {"codec": ["block", 4], **WARM}, 1),
    "topk, 10 %": ("topk", {"ratio": 0.1, **WARM}, 1),
    "powersgd": ("powersgd", {"rank": 4, **WARM}, 1),
    "gradient_allreduce, Adam": ("gradient_allreduce", {"optimizer": "adam"}, 1),
    "qadam": ("qadam", WARM, 1), "onebit_adam": ("onebit_adam", WARM, 1),
    "qadam, gradients_untouched": ("qadam", {"gradients_untouched": True, **WARM}, 1),
    "onebit_adam, gradients_untouched": ("onebit_adam", {"gradients_untouched": True, **WARM}, 1),
    "decentralized": ("decentralized", WARM, 1),
    "decentralized, shift_one": ("decentralized", {"peer_selection_mode": "shift_one", **WARM}, 1),
    "low_precision_decentralized": ("low_precision_decentralized", WARM, 1), "choco": ("choco", WARM, 1),
    "local_sgd, 2": ("local_sgd", {"communication_interval": 2, **WARM}, 2),
    "local_sgd": ("local_sgd", {"communication_interval": 4, **WARM}, 4),
    "diloco": ("diloco", WARM, 8),
    # As first published: the whole model at once, in full precision.
    **{f"diloco, {steps}": ("diloco", {"communication_interval": steps, "fragments": 1, "overlap_steps": 0,
                                       "codec": None, **WARM}, steps) for steps in (8, 16)},
    # Without a period; but steps differ, depending on arrivals.
    "async": ("async", {"sync_interval_ms": 100, **WARM}, 4),
    "async, at once": ("async", {"sync_interval_ms": 0, **WARM}, 4),        # without pauses: the default
}


def _cell(ranks, hosts, way, arguments, period, slowness, seconds):
    """Measures one cell; returns its samples."""
    in_rounds = way.startswith("async")
    each = [(way, arguments, slow) for slow in slowness]
    warmup = SETTLES if way == "auto" and "plan" not in arguments else max(2, period)
    one = max(ranks.call("prepare", warmup, each=each))
    steps = max(2, min(12, round(seconds / one)))
    steps = -(-steps // period) * period
    hosts.carrier.report()
    found = ranks.call("measure", steps, seconds if in_rounds else 0)
    carried = hosts.carrier.report()
    plans = {tuple(plan) for plan in ranks.call("plan")} if way == "auto" else set()
    if len(plans) > 1:
        raise RuntimeError(f"ranks have chosen differently: {plans}")
    elapsed = max(rank["elapsed"] for rank in found)
    made = sum(rank["made"] for rank in found)
    processor = sum(rank["cpu"] for rank in found) / elapsed + carried.share
    return {
        **{f"step of rank {rank}": ("s", answer["steps"]) for rank, answer in enumerate(found)},
        "queued": ("of the time", [answer["queued"] / answer["elapsed"] for answer in found]),
        "late": ("s", [max(answer["late"]) for answer in found]),
        "bytes on the wire per rank and step": ("bytes", [carried.nbytes / made]),
        "dropped": ("packets", [carried.dropped]),
        "processor": ("share of all cores", [processor / len(os.sched_getaffinity(0))]),
        "carrier": ("share of a core", [carried.share]),
        **({"plan": ("place, bytes", plans.pop())} if plans else {}),
    }


def run(hosts_count, rate, delay, ways, model="resnet18", per_host=1, slow=1.0, environment=None, seconds=4.0,
        experiment="step", folder=records.FOLDER, ranks=None, where=None, profile=None, pace=1.0, tries=TRIES):
    """Measures the cells of one network; yields the records.

    Args:
        ways: as WAYS. delay: one-way, in milliseconds. slow: factor on the last rank's computation time. environment:
            variables of the ranks. tries: maximum for a cell, until it counts.
        ranks, where: from an earlier call, with a changed network; otherwise they are created.
        profile: instead of the model's. pace: speedup of all ranks' computation, as with an accelerator.
    """
    if where is None:
        with Hosts(hosts_count, rate, delay) as where:
            with Ranks(where, profile or profiles.load(model), per_host, environment) as ranks:
                yield from run(hosts_count, rate, delay, ways, model, per_host, slow, environment, seconds, experiment,
                               folder, ranks, where, profile, pace, tries)
        return
    where.change(rate=rate, delay=float(delay))
    reached: list[float] = []
    done = None
    for label, attempt in itertools.product(ways, range(tries)):
        if attempt and not why_not(done):
            continue
        if not reached or attempt:
            reached = [found / bytes_per_s(rate) / DATA for found in plain.throughput(where, 1.5, 1 + delay / 20)]
        way, arguments, period = ways[label]
        slowness = [1 / pace] * (ranks.size - 1) + [slow / pace]
        samples = _cell(ranks, where, way, arguments, period, slowness, seconds)
        setting = {"model": model, "hosts": hosts_count, "per_host": per_host, "rate": rate, "delay_ms": delay,
                   "slow": slow, "way": label, "arguments": arguments, "environment": environment or {},
                   **({"pace": pace} if pace != 1 else {})}
        done = records.append(experiment, setting, {**samples, "plain TCP": ("of the rate", reached)}, folder=folder)
        yield done


def _period(record):
    return WAYS[record.setting["way"]][2] if record.setting["way"] in WAYS else 1


def ms(record, steps=slice(None)):
    """Milliseconds of a step, or of some steps, by the mean of the ranks' rates, which may differ.

    A rank's rate is that of its median step, because a shared machine sometimes stalls; of its mean if steps differ.
    """
    middle = statistics.median if _period(record) == 1 else statistics.fmean
    rates = [1 / middle(samples.values[steps]) for name, samples in record.samples.items()
             if name.startswith("step of rank")]
    return 1e3 / statistics.fmean(rates)


def slowest(record):
    """The slowest rank's seconds in each step: after a late step, only the late rank's next step is short."""
    return list(map(max, zip(*(samples.values for name, samples in record.samples.items()
                               if name.startswith("step of rank")), strict=False)))


def spread(record):
    """(shortest, longest) step of the slowest rank in ms; of periods if steps differ, as in ms()."""
    period, steps = _period(record), [1e3 * seconds for seconds in slowest(record)]
    if period > 1:
        steps = [ms(record, slice(at, at + period)) for at in range(0, len(steps), period)]
    return min(steps), max(steps)


def nbytes(record):
    """Bytes on the wire for each rank and step."""
    return record.samples["bytes on the wire per rank and step"].values[0]


def why_not(record):
    """The reason why a record does not count, or ""."""
    if record.samples["processor"].values[0] > BUSY:
        return "processor"
    if max(record.samples["queued"].values) > QUEUED:
        return "queued"
    if record.samples["carrier"].values[0] > BUSY:
        return "carrier"
    steps = slowest(record)
    if _period(record) == 1 and statistics.median(steps) > STEADY * min(steps):
        return "unsteady"
    return "" if min(record.samples["plain TCP"].values) >= REACHED else "plain TCP"


def newest(experiment="step", folder=records.FOLDER, pace=1.0, per_host=1, **setting):
    """{configuration: its newest record that counts, otherwise its newest} of one setting."""
    found: dict[str, records.Record] = {}
    for record in records.read(experiment, folder, per_host=per_host, **setting):
        if record.setting.get("pace", 1.0) != pace:
            continue
        old = found.get(record.setting["way"])
        if old is None or not why_not(record) or why_not(old):
            found[record.setting["way"]] = record
    return found


def main(arguments=None):
    """Runs the program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.laboratory.step_times", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18", choices=profiles.MODELS)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--per-host", type=int, default=1, help="ranks; default 1")
    parser.add_argument("--rate", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--delay", nargs="+", type=float, default=[0.0], metavar="MS", help="one way; default 0")
    parser.add_argument("--slow", type=float, default=1.0, help="how much longer the last rank computes; default 1")
    parser.add_argument("--pace", type=float, default=1.0, help="how many times faster all ranks compute; default 1")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY",
                        help="; ".join(WAYS).replace("%", "%%"))
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="variables of the ranks")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each cell, about; default 4")
    parser.add_argument("--experiment", default="step", help="name of the records; default step")
    parser.add_argument("--folder", default=records.FOLDER, help="of the records")
    options = parser.parse_args(arguments)
    if problem := why_impossible():
        parser.error(problem)
    environment = dict(text.split("=", 1) for text in options.set)
    profile = profiles.load(options.model)
    for count in options.hosts:
        with Hosts(count, options.rate[0], options.delay[0]) as where:
            with Ranks(where, profile, options.per_host, environment) as ranks:
                for rate in options.rate:
                    for delay in options.delay:
                        ways = {label: WAYS[label] for label in options.ways}
                        for record in run(count, rate, delay, ways, options.model, options.per_host,
                                          options.slow, environment, options.seconds, options.experiment,
                                          options.folder, ranks, where, profile, options.pace):
                            print(f"{count} hosts, {rate}, {delay:g} ms, {json.dumps(environment)}, "
                                  f"{record.setting['way']:36}{ms(record):9.1f} ms a step "
                                  f"{nbytes(record) / 1e6:8.2f} MB  {why_not(record)}", flush=True)
                        time.sleep(1)           # other programs run on this machine, too
    return 0


if __name__ == "__main__":
    sys.exit(main())
