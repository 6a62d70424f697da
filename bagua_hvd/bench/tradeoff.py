"""What each algorithm buys: time per step, bytes, time to quality, on one network and over all of them.

    python -m bagua_hvd.bench.tradeoff --hosts 4 --rate 1gbit --delay 5                 as root: measured
    python -m bagua_hvd.bench.tradeoff --predict --hosts 8 --parameters 110e6 --step-ms 200 --output FOLDER
    python -m bagua_hvd.bench.tradeoff --small --output FOLDER                          minutes, a small model

Measured: bench/laboratory.py, real communication of ranks that sleep for computing. Predicted: bench/predict.py. The
map is a prediction, always: for each bandwidth and latency the least relaxed way within 10 % of the quickest. Time to
quality is time per step, times the steps that were needed relative to gradient_allreduce (records "quality"), of which
exact ones take as long as its own.

With --pictures it draws those of the documentation from its records.
"""
import argparse
import functools
import importlib
import math
import statistics
import sys
from contextlib import contextmanager
from pathlib import Path

from bagua_hvd import algorithms
from bagua_hvd.algorithms.exact_steps import is_exact
from bagua_hvd.bench import laboratory, predict, profiles, records, report
from bagua_hvd.bench.hosts import why_impossible
from bagua_hvd.bench.network import bytes_per_s

DOCS = records.ROOT / "docs"
SMALL = ("none", "gradient_allreduce", "bytegrad", "async")
# From exact to loose: what must be given up for speed.
RELAXED = ("gradient_allreduce", "bytegrad", "doublesqueeze", "decentralized, shift_one", "choco", "local_sgd",
           "diloco, 16", "async")
NEAR = 1.1
MAPPED = "resnet18", "vgg11", "lstm", "transformer"
COLUMNS = ("way", "ms per step", "shortest to longest", "MB sent", "speed", "to quality")
CURVE = ("ddp", "gradient_allreduce", "bytegrad", "doublesqueeze", "decentralized, shift_one", "local_sgd", "async")
QUALITY_CURVE = ("ddp", "gradient_allreduce", "bytegrad", "terngrad", "topk", "doublesqueeze", "choco",
                 "decentralized, shift_one")
# way -> row of the quality with the same arguments.
WHICH = {**{name: name for name in ("bytegrad", "qsgd", "powersgd", "terngrad", "topk")}, "topk, 10 %": "topk 10 %",
         "ef_signsgd": "ef_signsgd", "doublesqueeze": "doublesqueeze",
         "doublesqueeze, block(4)": "doublesqueeze block(4)",
         "qadam, wait_in_step": "qadam", "onebit_adam, wait_in_step": "onebit_adam", "decentralized": "decentralized",
         "decentralized, shift_one": "decentralized shift_one",
         **{name: name for name in ("low_precision_decentralized", "choco", "push_sum")},
         "local_sgd, 2": "local_sgd", "local_adam, 12": "local_adam", "diloco, 8": "diloco",
         "streaming_diloco, 8": "streaming_diloco"}
LATE = "gradient_allreduce, delay"
# What BAGUA's authors have published: images per second of VGG16 over 10 Gbit/s, and seconds per epoch of BERT-Large
# over 1 Gbit/s, on 16 machines of 8 GPUs. Read off figures of their documentation; None: not there. Theirs -> our way.
HOROVOD = 4500, 2570
PUBLISHED = {
    "allreduce": ("gradient_allreduce", 4500, None), "Decentralized": ("decentralized, shift_one", 4700, 1505),
    "Low-precision decentralized": ("low_precision_decentralized", 16000, 735),
    "ByteGrad": ("bytegrad", 19700, 700), "QAdam": ("qadam, wait_in_step", 17800, None),
    "QAdam, 1 bit": ("onebit_adam, wait_in_step", None, 75), "Async": ("async", 28950, 61)}
RATES = ("100mbit", "300mbit", "1gbit", "2gbit")


def _cell(record, base):
    """Of a table: milliseconds, and how many times faster than gradient_allreduce."""
    if record is None:
        return ""
    if why := laboratory.why_not(record):
        return f"not measurable ({why})"
    faster = laboratory.ms(base) / laboratory.ms(record) if base and not laboratory.why_not(base) else None
    return f"{laboratory.ms(record):.0f}" + (f" ({faster:.1f}x)" if faster else "")


def _table(columns, first="ms per step"):
    """columns: {heading: {way: record}}. None where nothing was measured."""
    ways = [way for way in laboratory.WAYS if any(way in found for found in columns.values())]
    if not ways:
        return "Nothing measured yet."
    lines = [(f"`{way}`", *(_cell(found.get(way), found.get("gradient_allreduce")) for found in columns.values()))
             for way in ways]
    return report.table((first, *columns), lines, left=1)


def throughput(rate, model="resnet18"):
    """ms per step over the number of hosts, without delay."""
    return _table({f"{hosts} hosts": laboratory.newest(
        rate=rate, hosts=hosts, delay_ms=0.0, slow=1.0, model=model, environment={}) for hosts in (2, 4, 8)})


def latency(hosts="4", rate="1gbit", model="resnet18"):
    """ms per step over the delay."""
    return _table({f"{delay:g} ms": laboratory.newest(
        rate=rate, hosts=int(hosts), delay_ms=delay, slow=1.0, model=model, environment={})
        for delay in (0.0, 5.0, 20.0)})


def straggler(hosts="4", rate="1gbit", model="resnet18"):
    """ms per step where the last rank computes longer."""
    return _table({f"one {slow:g}x slower" if slow > 1 else "all alike": laboratory.newest(
        rate=rate, hosts=int(hosts), delay_ms=0.0, slow=slow, model=model, environment={}) for slow in (1.0, 2.0, 4.0)})


def pace_apart(hosts="4", rate="1gbit", pace="10", model="resnet18"):
    """ms per step with quicker computing, far from each other, and with one rank that computes longer."""
    places = {"alike, near": (0.0, 1.0), "20 ms": (20.0, 1.0), "one 4x slower": (0.0, 4.0)}
    near, *apart = columns = [laboratory.newest(
        rate=rate, hosts=int(hosts), delay_ms=delay, slow=slow, model=model, environment={}, pace=float(pace))
        for delay, slow in places.values()]
    for way in set(near).difference(*apart):
        del near[way]
    return _table(dict(zip(places, columns, strict=True)))


def pace(rate="1gbit", pace="10", model="resnet18"):
    """ms per step where computing takes so many times less."""
    return _table({f"{hosts} hosts": laboratory.newest(
        rate=rate, hosts=hosts, delay_ms=0.0, slow=1.0, model=model, environment={}, pace=float(pace))
        for hosts in (2, 4, 8)})


def hidden(model="resnet18"):
    """Of what gradient_allreduce exposes, the share that delay=1 hides; medians of the runs that count.

    Exposed is what a step takes longer than one without communication. Records "late".
    """
    runs: dict[tuple[float, str], dict[str, list[float]]] = {}
    for record in records.read("late", model=model):
        if not laboratory.why_not(record):
            said = record.setting
            each = runs.setdefault((said.get("pace", 1.0), said["rate"]), {})
            each.setdefault(said["way"], []).append(laboratory.ms(record))
    lines = []
    for (pace, rate), of in sorted(runs.items()):
        if not {"none", "gradient_allreduce", LATE} <= of.keys():
            continue
        none, exact, late = (statistics.median(of[way]) for way in ("none", "gradient_allreduce", LATE))
        lines.append((rate, f"{pace:g}x", f"{none:.0f}", f"{exact:.0f}", f"{late:.0f}",
                      f"{(exact - late) / (exact - none):.0%}",
                      ", ".join(f"{(exact - each) / (exact - none):.0%}" for each in of[LATE])))
    if not lines:
        return "Nothing measured yet."
    head = "rate", "computing", "`none`", "`gradient_allreduce`", "`delay=1`", "hidden", "each run"
    return report.table(head, lines, left=1)


def ablation(hosts="2", per_host="2", rate="1gbit", model="resnet18"):
    """ms per step with one optimization of the engine taken away."""
    columns = {"all": {}, "no overlap": {"BAGUA_OVERLAP": "0"}, "no fusion": {"BAGUA_FUSION": "0"},
               "no hierarchy": {"BAGUA_HIERARCHY": "0"}}
    found = {name: laboratory.newest(rate=rate, hosts=int(hosts), per_host=int(per_host), delay_ms=0.0, model=model,
                                     environment=variables) for name, variables in columns.items()}
    ways = [way for way in laboratory.WAYS if way in found["all"]]
    if not ways:
        return "Nothing measured yet."
    lines = []
    for way in ways:
        base = found["all"][way]
        cells = []
        for name, records_of in found.items():
            record = records_of.get(way)
            if record is None or laboratory.why_not(record):
                cells.append(_cell(record, None))
            else:
                more = laboratory.ms(record) / laboratory.ms(base) - 1
                cells.append(f"{laboratory.ms(record):.0f}" + (f" ({more:+.0%})" if name != "all" else ""))
        lines.append((f"`{way}`", *cells))
    return report.table(("ms per step", *found), lines, left=1)


def bytes_sent(hosts="8", model="resnet18"):
    """MB on the wire for each rank and step, beside what the formulas say."""
    found = laboratory.newest(rate="1gbit", hosts=int(hosts), delay_ms=0.0, slow=1.0, model=model, environment={})
    profile = profiles.load(model)
    lines = []
    for way in laboratory.WAYS:
        if way in found and way != "none":
            said = predict.sends(way, int(hosts), profile.parameters, predict.factors(profile))
            wire = f"{said.nbytes / said.period * predict.FRAMING / 1e6:.2f}" if said.nbytes else "by the clock"
            lines.append((f"`{way}`", f"{laboratory.nbytes(found[way]) / 1e6:.2f}", wire))
    return report.table(("MB on the wire", "measured", "formula"), lines, left=1) if lines else "Nothing measured yet."


def _is_for_adam(way):
    name, said, _ = laboratory.WAYS[way]
    return said.get("optimizer") == "adam" or (name in algorithms.names() and algorithms.get(name).uses_adam)


def _compared():
    """(record, predicted ms) of all that count, but those whose optimizer is Adam, whose arithmetic is not slept."""
    for record in records.read("step", environment={}, slow=1.0, per_host=1):
        said = record.setting
        if laboratory.why_not(record) or _is_for_adam(said["way"]) or "pace" in said:
            continue
        network = predict.Network(said["hosts"], bytes_per_s(said["rate"]), said["delay_ms"] / 1e3)
        yield record, 1e3 * predict.step_s(said["way"], profiles.load(said["model"]), network)


def prediction_error(quantile="0.5"):
    """Of all measured cells, the error of the prediction: so many of them have a smaller one."""
    errors = sorted(abs(predicted / laboratory.ms(record) - 1) for record, predicted in _compared())
    return f"{100 * errors[min(len(errors) - 1, int(float(quantile) * len(errors)))]:.0f} %" if errors else "?"


def speed(way, hosts, rate, delay="0", slow="1", over="gradient_allreduce", pace="1"):
    """How many times as fast as another way. A "+" stands for a comma and a space."""
    found = laboratory.newest(rate=rate, hosts=int(hosts), delay_ms=float(delay), slow=float(slow), model="resnet18",
                              environment={}, pace=float(pace))
    ways = [found.get(name.replace("+", ", ")) for name in (way, over)]
    if any(record is None or laboratory.why_not(record) for record in ways):
        return "-"
    return f"{laboratory.ms(ways[1]) / laboratory.ms(ways[0]):.1f}x"


def milliseconds(way, hosts, rate):
    """Of a step."""
    record = laboratory.newest(rate=rate, hosts=int(hosts), delay_ms=0.0, slow=1.0, model="resnet18",
                               environment={}).get(way)
    return f"{laboratory.ms(record):.0f}" if record and not laboratory.why_not(record) else "?"


def which():
    """How many times as fast as gradient_allreduce, and whether its loss is kept: ways that are rows of the quality."""
    quality = importlib.import_module("bagua_hvd.bench.quality")
    places = {"2 hosts, 100 Mbit/s": (2, "100mbit", 1), "8 hosts, 100 Mbit/s": (8, "100mbit", 1),
              "2 hosts, 1 Gbit/s, computing 10x as fast": (2, "1gbit", 10)}
    lines = [(f"`{way}`", *(speed(way, hosts, rate, pace=pace) for hosts, rate, pace in places.values()),
              quality.worst(row))
             for way, row in WHICH.items()]
    return report.table(("times as fast", *places, "of the loss, within 5 %"), lines, left=1)


def published():
    """How many times as fast as exact averages: what BAGUA's authors have published, and what is measured here."""
    profile, lines = profiles.load("resnet18"), []
    for theirs, (way, images, seconds) in PUBLISHED.items():
        exact, ours = (predict.sends(name, 8, profile.parameters) for name in ("gradient_allreduce", way))
        lines.append((theirs, f"{images / HOROVOD[0]:.1f}x" if images else "",
                      f"{HOROVOD[1] / seconds:.1f}x" if seconds else "", f"`{way}`",
                      f"{exact.nbytes / ours.nbytes:.1f}x" if ours.nbytes else "any",
                      *(speed(way, hosts, "100mbit") for hosts in ("2", "4", "8"))))
    lines.append(("", "", "", "`none`", "any", *(speed("none", hosts, "100mbit") for hosts in ("2", "4", "8"))))
    return report.table(("published", "VGG16, 10 Gbit/s", "BERT-Large, 1 Gbit/s", "here", "fewer bytes, 8 hosts",
                         "2 hosts", "4 hosts", "8 hosts"), lines, left=1)


def summary():
    """How many times as fast as gradient_allreduce: a few ways, by hosts and bandwidth."""
    places = [(hosts, rate) for rate in ("1gbit", "100mbit") for hosts in ("2", "4", "8")]
    lines = [(f"`{way}`", *(speed(way, *place) for place in places)) for way in CURVE if way != "gradient_allreduce"]
    return report.table(("", *(f"{hosts} hosts, {rate}" for hosts, rate in places)), lines, left=1)


def _told(options):
    """The profile: of a model that was measured, or of numbers."""
    if not options.parameters:
        return profiles.load(options.model)
    step, layers = options.step_ms / 1e3, 50
    share = math.isqrt(round(options.parameters / layers))
    return profiles.Profile("told", 0.3 * step, 0.6 * step, 0.1 * step,
                            [(f"layer{i}", (share, share), 0.6 * step * (i + 1) / layers) for i in range(layers)])


def _exact_steps(algorithm, told, steps):
    """How many of the first steps an algorithm makes as gradient_allreduce does. told: all its arguments."""
    warmup = told.get("warmup_steps", 0)
    warmup = 100 if warmup is None else warmup          # qadam and its kin
    kappa = 0 if algorithm.startswith("async") else told.get("kappa", 0)
    return sum(step < warmup or is_exact(step, kappa) for step in range(steps))


@functools.cache
def trainings(way, task=None):
    """Of all trainings (of a task): exact and relaxed steps until gradient_allreduce's loss, in parts of its steps.

    Infinite: it was never there. They are told what the way is, but for what changes no training on these hosts, and
    for the warm-up, which is left out where time is measured.
    """
    try:
        grid, page = (importlib.import_module(f"bagua_hvd.bench.quality.{name}") for name in ("grid", "page"))
    except ImportError:
        return []
    algorithm, said, _ = laboratory.WAYS[way]
    if algorithm not in algorithms.names():
        return []
    same = ("hierarchical", "wait_in_step")
    arguments = {name: value for name, value in said.items() if name not in (*same, "warmup_steps")}

    def told(setting):
        whole = grid.whole(algorithm, setting["arguments"], setting["defaults"])
        return {name: value for name, value in whole.items() if name not in same}

    wanted = told({"arguments": arguments, "defaults": grid.defaults(algorithm)})
    found, asked = [], {"task": task} if task else {}
    for record in records.read("quality", algorithm=algorithm, ranks=4, split="iid", **asked):
        if told(record.setting) != wanted:
            continue
        key = {name: record.setting[name] for name in ("task", "optimizer", "rate", "ranks", "split", "seed")}
        for exact in records.read("quality", algorithm="gradient_allreduce", **key)[-1:]:
            target = 1.05 * exact.samples["curve"].values[-1]
            steps, base = page.steps_to(record, target), page.steps_to(exact, target)
            if not base:
                continue
            first = _exact_steps(algorithm, wanted, math.ceil(steps)) if steps else math.inf
            found.append((first / base, (steps - first) / base if steps else 0.0))
    return found


def to_quality(way, relaxed, exact, task=None):
    """Time until the loss of gradient_allreduce, relative to its own; None: no record says.

    relaxed, exact: time of a step of each kind.
    """
    if way in ("gradient_allreduce", "ddp"):            # DDP's averages are exact, too
        return relaxed / exact
    times = [first + rest * relaxed / exact for first, rest in trainings(way, task)]
    return statistics.median(times) if times else None


def sooner(way, rate, hosts=2, model="resnet18", task=None, pace=1.0):
    """How many times sooner than gradient_allreduce at its loss, without delay; None: no record says.

    Where Adam is computed, it is in both times.
    """
    found = laboratory.newest(rate=rate, hosts=int(hosts), delay_ms=0.0, slow=1.0, model=model, environment={},
                              pace=pace)
    record, base = found.get(way), found.get("gradient_allreduce, Adam" if _is_for_adam(way) else "gradient_allreduce")
    if record is None or base is None or laboratory.why_not(record) or laboratory.why_not(base):
        return None
    times = to_quality(way, laboratory.ms(record), laboratory.ms(base), task)
    return None if times is None else 1 / times


def time_to_quality():
    """sooner(), of all ways whose quality has been measured; a dash: their speed has not."""
    of = {"1gbit": ("1gbit", 1.0), "1gbit, computing 10x": ("1gbit", 10.0), "100mbit": ("100mbit", 1.0)}
    places = {f"{name}, {hosts} hosts": (rate, hosts, pace) for name, (rate, pace) in of.items() for hosts in (2, 4)}

    def cell(way, rate, hosts, pace):
        times = sooner(way, rate, hosts, pace=pace)
        return "-" if times is None else f"{times:.1f}x" if times else "never"

    apart = {"gradient_allreduce", "lamb", "onebit_lamb", "dion"}      # these are other optimizers
    lines = [(f"`{way}`", *(cell(way, *place) for place in places.values()), str(len(trainings(way))))
             for way, (algorithm, *_) in laboratory.WAYS.items() if algorithm not in apart and trainings(way)]
    return report.table(("", *places, "trainings"), lines, left=1) if lines else "Nothing measured yet."


def speed_to_quality(way, rate, hosts="2", task=None):
    """sooner(), for a sentence. A "+" stands for a comma and a space."""
    times = sooner(way.replace("+", ", "), rate, hosts, task=task)
    return "?" if times is None else f"{times:.1f}x" if times else "never"


def _lines(rows):
    """rows: (way, ms, shortest, longest, bytes)."""
    base = next((row[1] for row in rows if row[0] == "gradient_allreduce"), None)
    for way, middle, low, high, sent in rows:
        times = to_quality(way, middle, base) if base else None
        yield (way, f"{middle:.1f}", f"{low:.1f} to {high:.1f}", f"{sent / 1e6:.2f}",
               f"{base / middle:.2f}x" if base else "-",
               "?" if times is None else f"{1 / times:.2f}x" if times < math.inf else "never")


def winner(profile, network, ways=RELAXED):
    """The first of `ways` within NEAR of the quickest, by prediction."""
    times = {way: predict.step_s(way, profile, network) for way in ways}
    best = min(times.values())
    return next(way for way in ways if times[way] <= NEAR * best)


def draw_map(path, drawn, hosts=8, points=32):
    """Winners by bandwidth and latency, a panel for each profile."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    rates, latencies = np.logspace(7, 11, points), np.logspace(-5, -1, points)
    colors = [f"C{index}" for index in range(len(RELAXED))]
    figure = pyplot.figure(figsize=(max(7.0, 3.1 * len(drawn) + 0.4), 3.9))
    panels = [figure.add_subplot(1, len(drawn), index + 1) for index in range(len(drawn))]
    for profile, panel in zip(drawn, panels, strict=True):
        grid = [[RELAXED.index(winner(profile, predict.Network(hosts, rate / 8, delay))) for rate in rates]
                for delay in latencies]
        panel.pcolormesh(rates, latencies * 1e3, grid, cmap=ListedColormap(colors), vmin=-0.5, vmax=len(RELAXED) - 0.5)
        panel.set(xscale="log", yscale="log", xlabel="bit/s",
                  title=f"{profile.model}: {profile.parameters / 1e6:.0f} M, {1e3 * profile.computing_s:.0f} ms")
        panel.title.set_fontsize(9)
    panels[0].set_ylabel("latency, ms one way")
    figure.legend(handles=[Patch(color=color, label=way) for color, way in zip(colors, RELAXED, strict=True)],
                  loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"predicted, {hosts} hosts: the least relaxed way within 10 % of the quickest step", fontsize=9)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_steps(path, columns, ylabel="ms per step", title=""):
    """Bars with their spread. columns: {heading: [(way, ms, shortest, longest, bytes)]}."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(columns), figsize=(4.2 * len(columns) + 1, 4.6), squeeze=False)
    for (heading, rows), panel in zip(columns.items(), panels[0], strict=True):
        middles = [row[1] for row in rows]
        errors = [[max(0.0, row[1] - row[2]) for row in rows], [max(0.0, row[3] - row[1]) for row in rows]]
        panel.barh([row[0] for row in rows], middles, xerr=errors, color="#4f8fd0", ecolor="#76808a", height=0.7)
        panel.invert_yaxis()
        panel.tick_params(labelsize=7)
        panel.set(xlabel=ylabel)
        panel.set_title(heading, fontsize=9)
        panel.grid(axis="x", alpha=0.3)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


@contextmanager
def _over_bandwidth(path, mbits, ylabel, values, title):
    """Gives the panel of a figure in this file; both axes are logarithmic.

    Args:
        mbits, values: that the axes name. values: {value: what it is called}.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.fonttype"] = "none"
    pyplot.rcParams["svg.hashsalt"] = "bagua_hvd"       # the same records make the same file
    figure, panel = pyplot.subplots(figsize=(7, 3.6))
    yield panel
    panel.set(xscale="log", yscale="log", xlabel="Mbit/s", ylabel=ylabel, title=title)
    panel.set_xticks(mbits, [f"{mbit:,}" for mbit in mbits])
    panel.set_yticks(list(values), list(values.values()))
    panel.minorticks_off()
    panel.title.set_fontsize(9)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7, ncols=2, frameon=False, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if str(path).endswith("svg") else None)
    pyplot.close(figure)


def draw_curve(path, hosts=2, model="resnet18"):
    """ms per step over the bandwidth: points measured, lines predicted."""
    import numpy as np

    profile, rates = profiles.load(model), np.logspace(7.7, 10, 60)
    title = f"{model}, {profile.parameters / 1e6:.1f} M parameters, {hosts} hosts: points measured, lines predicted"
    values = {value: f"{value:,}" for value in (250, 500, 1000, 2000, 4000, 8000)}
    with _over_bandwidth(path, [100, 300, 1000, 2000, 10000], "ms per step", values, title) as panel:
        for way in CURVE:
            line, = panel.plot(rates / 1e6, [1e3 * predict.step_s(way, profile, predict.Network(hosts, rate / 8))
                                             for rate in rates], alpha=0.4)
            for rate in RATES:
                record = laboratory.newest(rate=rate, hosts=hosts, delay_ms=0.0, slow=1.0, model=model,
                                           environment={}).get(way)
                if record and not laboratory.why_not(record):
                    middle, (low, high) = laboratory.ms(record), laboratory.spread(record)
                    panel.errorbar(8e-6 * bytes_per_s(rate), middle, [[max(0, middle - low)], [max(0, high - middle)]],
                                   marker="o", markersize=5, color=line.get_color())
            panel.plot([], [], marker="o", color=line.get_color(), label=way)


def draw_time_to_quality(path, hosts=2, model="resnet18"):
    """sooner() over the bandwidth: points measured, joined. Ways for which no record says it are left out."""
    title = f"time to the loss of gradient_allreduce: {model} on {hosts} hosts"
    values = {value: f"{value}x" for value in (1, 2, 4, 8, 16)}
    with _over_bandwidth(path, [100, 300, 1000, 2000], "times as soon", values, title) as panel:
        for way in QUALITY_CURVE:
            points = [(8e-6 * bytes_per_s(rate), times) for rate in RATES
                      if (times := sooner(way, rate, hosts, model))]        # neither unknown nor never
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", markersize=5, label=way)


def _row(record):
    return record.setting["way"], laboratory.ms(record), *laboratory.spread(record), laboratory.nbytes(record)


def draw_documentation():
    """The pictures of the documentation, from its records."""
    draw_curve(DOCS / "tradeoff.svg")
    draw_time_to_quality(DOCS / "time-to-quality.svg")
    draw_map(DOCS / "results" / "tradeoff-map.png", [profiles.load(model) for model in MAPPED])
    columns = {}
    for rate in ("1gbit", "100mbit"):
        found = laboratory.newest(rate=rate, hosts=8, delay_ms=0.0, slow=1.0, model="resnet18", environment={})
        if rows := [_row(found[way]) for way in laboratory.WAYS if way in found and not laboratory.why_not(found[way])]:
            columns[f"8 hosts, {rate}"] = rows
    if columns:
        draw_steps(DOCS / "results" / "tradeoff-steps.png", columns, title="measured; lines: shortest to longest step")


def _measure(options, profile):
    folder = options.output or "."
    ways = {label: laboratory.WAYS[label] for label in options.ways}
    found = laboratory.run(options.hosts, options.rate, options.delay, ways, profile.model,
                           seconds=options.seconds, experiment="tradeoff", folder=folder, profile=profile)
    for record in found:
        if why := laboratory.why_not(record):
            print(f"{record.setting['way']}: not measurable here ({why})", flush=True)
        else:
            yield _row(record)


def _predicted(options, profile):
    network = predict.Network(options.hosts, bytes_per_s(options.rate), options.delay / 1e3)
    for way in options.ways:
        milliseconds = 1e3 * predict.step_s(way, profile, network)
        said = predict.sends(way, network.hosts, profile.parameters, predict.factors(profile))
        yield way, milliseconds, milliseconds, milliseconds, said.nbytes / said.period


def main(arguments=None):
    """The program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bagua_hvd.bench.tradeoff", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it; default 1gbit")
    parser.add_argument("--delay", type=float, default=0.0, metavar="MS", help="one way; default 0")
    parser.add_argument("--model", default="resnet18", choices=profiles.MODELS, help="default resnet18")
    parser.add_argument("--parameters", type=float, help="instead: so many, in 50 layers")
    parser.add_argument("--step-ms", type=float, default=100.0, help="of these: what a step computes; default 100")
    parser.add_argument("--ways", nargs="+", default=list(laboratory.WAYS), choices=laboratory.WAYS, metavar="WAY",
                        help="; ".join(laboratory.WAYS).replace("%", "%%"))
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement, about; default 4")
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("--small", action="store_true", help=f"2 hosts, a million parameters, {', '.join(SMALL)}")
    parser.add_argument("--output", metavar="FOLDER", help="for pictures and records")
    parser.add_argument("--pictures", action="store_true", help="draw those of the documentation, and nothing else")
    options = parser.parse_args(arguments)
    if options.pictures:
        draw_documentation()
        return 0
    if options.small:
        options.hosts, options.parameters, options.step_ms, options.seconds = 2, 1e6, 20.0, 0.3
        options.ways = list(SMALL)
    if not options.predict and (problem := why_impossible()):
        parser.error(problem + ", or give --predict")
    profile = _told(options)
    rows = list((_predicted if options.predict else _measure)(options, profile))
    how = "predicted" if options.predict else "measured"
    print(f"\n{profile.parameters / 1e6:.1f} M parameters, {1e3 * profile.computing_s:.0f} ms of computing, "
          f"{options.hosts} hosts, {options.rate}, {options.delay:g} ms one way: {how}\n")
    print(report.table(COLUMNS, list(_lines(rows)), left=1))
    network = predict.Network(options.hosts, bytes_per_s(options.rate), options.delay / 1e3)
    print(f"\nthe least relaxed within 10 % of the quickest, predicted: {winner(profile, network)}")
    if not options.predict and rows:
        errors = [abs(1e3 * predict.step_s(row[0], profile, network) / row[1] - 1) for row in rows]
        print(f"error of the prediction, median: {100 * statistics.median(errors):.0f} %")
    if options.output:
        Path(options.output).mkdir(parents=True, exist_ok=True)
        draw_steps(Path(options.output, "steps.png"), {how: rows})
        draw_map(Path(options.output, "map.png"), [profile], options.hosts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
