"""The tables and figures of docs/results/tradeoff.md and of other pages, from the records.

Milliseconds per step are those of step_times.py. Each public function makes a part that a page requests with
`<!-- from tradeoff.FUNCTION ... -->`, with arguments as texts (records.py).
"""
import importlib
import json
import statistics
from typing import Any

from bagua_hvd.bench import predict, report
from bagua_hvd.bench.predict import bytes_per_s
from tests.laboratory import profiles, records, step_times
from tests.laboratory.tradeoff import predicted
from tests.laboratory.tradeoff.to_quality import is_for_adam, sooner, trainings

LATE = "gradient_allreduce, delay"
# For docs/choose.md: network, name, our configuration, arguments of speed(), and the optimizers; None: all.
CHOICES: tuple[tuple[str, str, str, dict[str, str], str | None], ...] = (
    ("one host, or steps that do not wait", "gradient_allreduce", "gradient_allreduce", {}, None),
    ("1 Gbit/s", "bytegrad", "bytegrad", {"rate": "1gbit"}, None),
    ("100 Mbit/s, any optimizer", "rotated", "rotated", {"rate": "100mbit"}, None),
    ("100 Mbit/s, Adam", "onebit_adam", "onebit_adam+gradients_untouched", {"rate": "100mbit"}, "adam"),
    ("1 Gbit/s, 20 ms, short steps, Adam", "diloco", "diloco", {"rate": "1gbit", "delay": "20", "pace": "10"},
     "adam"),
)


def _cell(record, base):
    """A table's cell: milliseconds, and the speedup over gradient_allreduce; a dash: it does not count."""
    if record is None:
        return ""
    if step_times.why_not(record):
        return "-"
    faster = step_times.ms(base) / step_times.ms(record) if base and not step_times.why_not(base) else None
    return f"{step_times.ms(record):.0f}" + (f" ({faster:.1f}x)" if faster else "")


def _speeds(columns):
    """{heading: {configuration: record}} -> how many times faster than gradient_allreduce, and its milliseconds.

    A dash: the measurement does not count; a row of dashes is left out.
    """
    columns = {name: found for name, found in columns.items() if found.keys() > {predict.EXACT}}
    lines = []
    for way in step_times.WAYS:
        cells = [_cell(found.get(way), found.get(predict.EXACT)) for found in columns.values()]
        if way == predict.EXACT:
            lines.insert(0, (f"`{way}`, ms", *(cell.partition(" ")[0] for cell in cells)))
        elif any(cell.strip("-") for cell in cells):
            lines.append((f"`{way}`", *(cell.partition("(")[2].strip(")") or (cell and "-") for cell in cells)))
    return report.table(("", *columns), lines, left=1) if columns else "Nothing measured yet."


# Heading of the table of speeds, and of that of times to quality -> arguments of step_times.newest().
NETWORKS: dict[str, dict[str, Any]] = {
    "1gbit": {"rate": "1gbit"}, "1gbit 10x": {"rate": "1gbit", "pace": 10.0}, "100mbit": {"rate": "100mbit"}}


def throughput(model="resnet18"):
    """Speeds by network and number of hosts, without delay."""
    return _speeds({f"{name}, {hosts} hosts": step_times.newest(
        **network, hosts=hosts, delay_ms=0.0, slow=1.0, model=model, environment={})
        for name, network in NETWORKS.items() for hosts in (2, 4, 8)})


def latency(hosts="4", rate="1gbit", model="resnet18"):
    """Speeds by delay."""
    return _speeds({f"{delay:g} ms": step_times.newest(
        rate=rate, hosts=int(hosts), delay_ms=delay, slow=1.0, model=model, environment={}) for delay in (5.0, 20.0)})


def straggler(hosts="4", rate="1gbit", model="resnet18"):
    """Speeds if the last rank computes longer."""
    return _speeds({f"one {slow:g}x slower": step_times.newest(
        rate=rate, hosts=int(hosts), delay_ms=0.0, slow=slow, model=model, environment={}) for slow in (2.0, 4.0)})


def hidden(model="resnet18"):
    """The share of gradient_allreduce's exposed time that delay=1 hides; medians of the runs that count.

    Exposed is the additional time of a step relative to one without communication. Records "late".
    """
    runs: dict[tuple[float, str], dict[str, list[float]]] = {}
    for record in records.read("late", model=model):
        if not step_times.why_not(record):
            said = record.setting
            each = runs.setdefault((said.get("pace", 1.0), said["rate"]), {})
            each.setdefault(said["way"], []).append(step_times.ms(record))
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
    """ms per step with one of the engine's optimizations switched off."""
    columns = {"all": {}, "no overlap": {"BAGUA_OVERLAP": "0"}, "no fusion": {"BAGUA_FUSION": "0"},
               "no hierarchy": {"BAGUA_HIERARCHY": "0"}}
    found = {name: step_times.newest(rate=rate, hosts=int(hosts), per_host=int(per_host), delay_ms=0.0, model=model,
                                     environment=variables) for name, variables in columns.items()}
    ways = [way for way in step_times.WAYS if way in found["all"]]
    if not ways:
        return "Nothing measured yet."
    lines = []
    for way in ways:
        base = found["all"][way]
        cells = []
        for name, records_of in found.items():
            record = records_of.get(way)
            if record is None or step_times.why_not(record):
                cells.append(_cell(record, None))
            else:
                more = step_times.ms(record) / step_times.ms(base) - 1
                cells.append(f"{step_times.ms(record):.0f}" + (f" ({more:+.0%})" if name != "all" else ""))
        lines.append((f"`{way}`", *cells))
    return report.table(("ms per step", *found), lines, left=1)


def bytes_sent(hosts="8", model="resnet18"):
    """The deviation of bytes on the wire from the formulas: of all configurations but the worst, and of that one."""
    found = step_times.newest(rate="1gbit", hosts=int(hosts), delay_ms=0.0, slow=1.0, model=model, environment={})
    profile = profiles.load(model)
    errors = []
    for way in step_times.WAYS:
        said = predicted.sends(way, int(hosts), profile.parameters, predict.thin(profile))
        if way in found and said.nbytes:
            errors.append((step_times.nbytes(found[way]) / (said.nbytes / said.period * predict.FRAMING) - 1, way))
    if len(errors) < 2:
        return "not measured yet"
    *_, (most, _), (worst, way) = sorted(errors)
    return f"{most:.1%}, with `{way}` by {worst:.0%}"


def _compared():
    """(record, predicted ms) of all that count, except those with Adam, whose arithmetic is not emulated."""
    for record in records.read("step", environment={}, slow=1.0, per_host=1):
        said = record.setting
        if (said["way"] not in step_times.WAYS or step_times.why_not(record) or is_for_adam(said["way"])
                or "pace" in said):
            continue
        network = predict.Network(said["hosts"], bytes_per_s(said["rate"]), said["delay_ms"] / 1e3)
        yield record, 1e3 * predicted.step_s(said["way"], profiles.load(said["model"]), network)


def prediction_error(quantile="0.5"):
    """The quantile of the prediction's error over all measured cells."""
    errors = sorted(abs(predicted / step_times.ms(record) - 1) for record, predicted in _compared())
    return f"{100 * errors[min(len(errors) - 1, int(float(quantile) * len(errors)))]:.0f} %" if errors else "?"


def speed(way, hosts, rate, delay="0", slow="1", over="gradient_allreduce", pace="1"):
    """The speedup over another configuration. A "+" represents a comma and a space."""
    found = _speed(way, hosts, rate, delay, slow, over, pace)
    return f"{found[0]:.1f}x" if found else "-"


def _speed(way, hosts, rate, delay="0", slow="1", over="gradient_allreduce", pace="1"):
    """speed(), and that for the configuration's longest and shortest step; None: not measured."""
    found = step_times.newest(rate=rate, hosts=int(hosts), delay_ms=float(delay), slow=float(slow), model="resnet18",
                              environment={}, pace=float(pace))
    mine, other = (found.get(name.replace("+", ", ")) for name in (way, over))
    if any(record is None or step_times.why_not(record) for record in (mine, other)):
        return None
    shortest, longest = step_times.spread(mine)
    return [step_times.ms(other) / ms for ms in (step_times.ms(mine), longest, shortest)]


def milliseconds(way, hosts, rate):
    """Milliseconds of a step."""
    record = step_times.newest(rate=rate, hosts=int(hosts), delay_ms=0.0, slow=1.0, model="resnet18",
                               environment={}).get(way)
    return f"{step_times.ms(record):.0f}" if record and not step_times.why_not(record) else "?"


def choose():
    """The recommendations of docs/choose.md: for each network a name, speed on 4 hosts, loss on 4 ranks, spreads.

    Raises ValueError: an algorithm is outside the margin on some task, so the page must not recommend it there.
    """
    quality = importlib.import_module("tests.laboratory.quality.page")
    lines = []
    for network, name, way, place, optimizer in CHOICES:
        times = _speed(way, 4, **place) if place else None
        said = "{:.1f}x ({:.1f} to {:.1f})".format(*times) if times else "not measured" if place else "1.0x"
        kept = quality.kept(name, optimizer) if name != predict.EXACT else "this is the reference"
        lines.append((network, f"`{name}`", said, kept))
    return report.table(("your network", "use", "speed", "loss"), lines, left=4)


def figure() -> str:
    """The input of docs/tradeoff.js: for each name its sends, by bench.predict, and its loss."""
    quality = importlib.import_module("tests.laboratory.quality.page")
    found: dict[str, dict[str, Any]] = {}
    for name in predict.LOSSES:
        few, many = (predict.sends(name, n, 1) for n in (2, 16))
        losses = "the reference" if name == predict.EXACT else quality.spread(name)
        found[name] = {"elements": few.nbytes / 4, "thin": predict.sends(name, 2, 0, 1).nbytes / 4,
                       "rounds": few.rounds, "grows": many.rounds > few.rounds, "when": few.when,
                       "period": few.period, "loss": losses}
    constants = {"framing": predict.FRAMING, "bucket": predict.BUCKET_NBYTES, "layers": predict.LAYERS}
    lines = [f"    {name}: {json.dumps(said)}," for name, said in found.items()]
    return "\n".join([f"const TRADEOFF = {{constants: {json.dumps(constants)}, algorithms: {{", *lines, "}};"])


# Column -> arguments of sooner().
Places = dict[str, dict[str, Any]]
NEAR: Places = {
    f"{name}, {hosts} hosts": {**network, "hosts": hosts} for name, network in NETWORKS.items() for hosts in (2, 4)
}
FAR: Places = {
    **{f"100mbit, {hosts} hosts": {"rate": "100mbit", "hosts": hosts} for hosts in (2, 4, 8)},
    "1gbit 10x, 2 hosts": {"rate": "1gbit", "hosts": 2, "pace": 10.0},
    "1gbit 10x, 20 ms, 4 hosts": {"rate": "1gbit", "hosts": 4, "delay": 20.0, "pace": 10.0},
    "1gbit, 4 hosts, one 4x slower": {"rate": "1gbit", "hosts": 4, "slow": 4.0},
}


def time_to_quality(task=None):
    """sooner() for configurations with measured quality, NEAR, or of one task FAR; a dash: their speed is unknown."""
    places = FAR if task else NEAR

    def cell(way, place):
        times = sooner(way, task=task, **place)
        return "-" if times is None else f"{times:.1f}x" if times else "never"

    count = {way: len(trainings(way, task)) for way, (algorithm, *_) in step_times.WAYS.items()
             if algorithm != predict.EXACT and trainings(way, task)}
    if not count:
        return "Nothing measured yet."
    fewest, most = min(count.values()), max(count.values())
    each = f"{fewest} trainings each" if fewest == most else f"{fewest} to {most} trainings each"
    return report.table((each, *places), [(f"`{way}`", *(cell(way, place) for place in places.values()))
                                          for way in count], left=1)


def speed_to_quality(way, rate, hosts="2", task=None, **network):
    """sooner(), for a sentence. A "+" represents a comma and a space. network: pace, delay, slow."""
    times = sooner(way.replace("+", ", "), rate, hosts, task=task, **{name: float(n) for name, n in network.items()})
    return "?" if times is None else f"{times:.1f}x" if times else "never"
