"""Time to quality: time per step, times the number of needed steps relative to gradient_allreduce.

Times are from the laboratory's records, steps from the trainings of bench/quality. An algorithm's full steps, which
send 8-bit floats, take as long as bytegrad's with these.
"""
import functools
import importlib
import math
import statistics

from bagua_hvd import algorithms
from bagua_hvd.algorithms.full_steps import is_full
from bagua_hvd.algorithms.qadam import QAdam
from tests.laboratory import records, step_times


def is_for_adam(way):
    """Whether its optimizer is Adam, whose arithmetic the laboratory's ranks do not emulate."""
    name, said, _ = step_times.WAYS[way]
    return said.get("optimizer") == "adam" or (name in algorithms.names() and algorithms.get(name).uses_adam)


def exact_way(way):
    """The configuration whose steps take as long as this one's exact steps."""
    return "bytegrad, float8, Adam" if is_for_adam(way) else "bytegrad, float8"


def _full_steps(algorithm, told, steps):
    """How many of an algorithm's first `steps` steps are full steps. told: all its arguments."""
    warmup = told.get("warmup_steps", 0)
    if warmup is None:                                  # qadam and its kin, without an argument for the optimizer
        warmup = QAdam.default_warmup_steps
    full_steps = 0 if algorithm.startswith("async") else told.get("full_steps", 0)
    return sum(step < warmup or is_full(step, full_steps) for step in range(steps))


@functools.cache
def trainings(way, task=None):
    """For all trainings (of a task): exact and relaxed steps to gradient_allreduce's loss, relative to its steps.

    Infinite: it was not reached. The trainings have the configuration's arguments, except those without an effect on
    these hosts, and the warm-up, which timings leave out.
    """
    try:
        grid, page = (importlib.import_module(f"tests.laboratory.quality.{name}") for name in ("grid", "page"))
    except ImportError:
        return []
    algorithm, said, _ = step_times.WAYS[way]
    if algorithm not in (*algorithms.names(), *grid.HOOKS):
        return []
    same = ("hierarchical", "gradients_untouched")
    arguments = {name: value for name, value in said.items() if name not in (*same, "warmup_steps")}

    def told(setting):
        whole = grid.whole(algorithm, setting["arguments"], setting["defaults"])
        return {name: value for name, value in whole.items() if name not in same}

    wanted = told({"arguments": arguments, "defaults": grid.defaults(algorithm)})
    found, asked = [], {"task": task} if task else {}
    for record in records.read("quality", algorithm=algorithm, ranks=4, split="iid", **asked):
        if (told(record.setting) != wanted or not grid.of_hosts(record)
                or record.setting["task"] in grid.ACCURACY_MARGINS):
            continue
        key = {name: record.setting[name] for name in ("task", "optimizer", "rate", "ranks", "split", "seed")}
        for exact in records.read("quality", algorithm="gradient_allreduce", **key)[-1:]:
            target = 1.05 * exact.samples["curve"].values[-1]
            steps, base = page.steps_to(record, target), page.steps_to(exact, target)
            if not base:
                continue
            first = _full_steps(algorithm, wanted, math.ceil(steps)) if steps else math.inf
            found.append((first / base, (steps - first) / base if steps else 0.0))
    return found


def relative_time(way, relaxed, exact, base, task=None):
    """Time to gradient_allreduce's loss, relative to its own; None: without a record.

    relaxed, exact, base: time of a step of each kind, and of gradient_allreduce. exact: None: unknown.
    """
    if way in ("gradient_allreduce", "ddp"):            # DDP's averages are exact, too
        return relaxed / base
    found = trainings(way, task)
    if not found or (exact is None and any(first for first, _ in found)):
        return None
    return statistics.median((first * exact if first else 0) + rest * relaxed for first, rest in found) / base


def sooner(way, rate, hosts=2, model="resnet18", task=None, pace=1.0, delay=0.0, slow=1.0):
    """The speedup over gradient_allreduce to its loss; None: without a record. Arguments: step_times.run().

    If Adam's arithmetic is computed, both times include it.
    """
    found = step_times.newest(rate=rate, hosts=int(hosts), delay_ms=delay, slow=slow, model=model, environment={},
                              pace=pace)

    def time(way):
        record = found.get(way)
        return None if record is None or step_times.why_not(record) else step_times.ms(record)

    relaxed, base = time(way), time("gradient_allreduce, Adam" if is_for_adam(way) else "gradient_allreduce")
    times = None if relaxed is None or base is None else relative_time(way, relaxed, time(exact_way(way)), base, task)
    return None if times is None else 1 / times
