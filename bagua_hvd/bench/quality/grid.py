"""Which trainings there are: tasks, optimizers and their rates, algorithms, ranks, splits, seeds; and the margin.

Written down before anything was measured: an algorithm keeps quality where its test loss is within MARGIN of
gradient_allreduce's, in the same task with the same optimizer, rate, ranks, split and seeds, by two one-sided tests at
LEVEL. It is named without arguments, and has no rate of its own: a user changes one word.

The rate of an optimizer is the one of its task's candidates with which gradient_allreduce has the lowest validation
loss, on 4 ranks, over the seeds TUNING, which serve nothing else; as many candidates for all.
"""
import inspect
import statistics
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from bagua_hvd import algorithms
from bagua_hvd.bench import records
from bagua_hvd.bench.quality.tasks import TASKS
from bagua_hvd.core import variables

EXPERIMENT = "quality"
REFERENCE = "gradient_allreduce"
MARGIN = 0.05               # relative
LEVEL = 0.05
SEEDS = (0, 1, 2, 3, 4)
TUNING = (1000,)
RANKS = (4, 8, 16)
SPLITS = ("iid", "skewed")
FOR_ADAM = ("acco", "dion", "local_adam", "lamb", "onebit_lamb", "qadam", "onebit_adam", "onebit_adam_published",
            "zero_one_adam")
# name in tables -> (algorithm, arguments): beside the names alone, another form that the documentation speaks of.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # of ranks: this host, where all are, would be one peer
    "decentralized shift_one": ("decentralized", {"peer_selection_mode": "shift_one", "hierarchical": False}),
    # Chosen with the seed 1000 of the task that it is for.
    "streaming_diloco sparing": ("streaming_diloco", {"kappa": 2, "mixing": 0.0}),
}
# Tasks of a question of their own, which are in no comparison of all: which rows they are for.
OWN: dict[str, tuple[str, ...]] = {"long": (REFERENCE, "streaming_diloco sparing")}


class Cell(NamedTuple):
    """One training. task, optimizer: of tasks.TASKS. arguments: what was said of the algorithm."""

    task: str
    optimizer: str
    rate: float
    algorithm: str
    arguments: dict[str, Any]
    ranks: int
    split: str
    seed: int

    def setting(self) -> dict[str, Any]:
        """For its record: with the arguments that nobody gave, so that another default is another training."""
        return self._asdict() | {"defaults": defaults(self.algorithm), "steps": TASKS[self.task]().steps}


def defaults(algorithm: str) -> dict[str, Any]:
    """Of an algorithm's arguments, and what else it does unasked, as JSON has them; whatever the environment says."""
    given = inspect.signature(type(algorithms.get(algorithm))).parameters
    kappa = variables.TABLE["BAGUA_EXACT_STEPS"].default
    unset = "kappa" in given and given["kappa"].default is None
    made = algorithms.get(algorithm, **({"kappa": kappa} if unset else {}))
    values = {each.name: getattr(made, each.name, each.default) for each in given.values()}
    # What has an argument's name and is a method is no value of it.
    values = {name: given[name].default if inspect.ismethod(value) else value for name, value in values.items()}
    if getattr(made, "empties_errors", False):
        values["empties_errors"] = True
    return {name: value if isinstance(value, int | float | str | None) else getattr(value, "__name__", str(value))
            for name, value in values.items()}


def rows() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name in tables -> (algorithm, arguments); the reference first."""
    names = [REFERENCE, *(name for name in algorithms.names() if name != REFERENCE)]
    return {name: (name, {}) for name in names} | VARIANTS


def serves(algorithm: str, optimizer: str) -> bool:
    """Whether the algorithm can go with the optimizer."""
    return optimizer.startswith("adam") or algorithm not in FOR_ADAM


def meant_for(row: str, task: str) -> bool:
    """Whether a row is to be trained on a task."""
    return row in OWN[task] if task in OWN else row == REFERENCE or all(row not in rows for rows in OWN.values())


def recorded(folder: Any = records.FOLDER, **setting: Any) -> list[records.Record]:
    """The records that still count: of the defaults there are now, and, if of this Python, of the steps.

    Tasks are made of what Python ships, so that another one's have other steps.
    """
    now: dict[Any, Any] = {}

    def current(record: records.Record) -> bool:
        key = record.setting["algorithm"], record.setting["task"]
        if key not in now:
            known = key[0] in algorithms.names() and key[1] in TASKS
            now[key] = {"defaults": defaults(key[0]), "steps": TASKS[key[1]]().steps} if known else None
        if now[key] is None:
            return False
        then = record.setting["defaults"]
        # An argument that came later and is off: the training is the same.
        added = {name: value for name, value in now[key]["defaults"].items()
                 if name not in then and (value is None or value is False)}
        same_python = record.machine["versions"]["Python"].startswith("{}.{}.".format(*sys.version_info))
        return (now[key]["defaults"] == {**added, **then} and
                (record.setting["steps"] == now[key]["steps"] or not same_python))

    return [record for record in records.read(EXPERIMENT, folder, **setting) if current(record)]


def best_rate(task: str, optimizer: str, found: Iterable[records.Record]) -> float | None:
    """The chosen rate; None: some candidate has not been tried yet. Of one there is nothing to choose."""
    candidates = TASKS[task]().optimizers[optimizer]
    if len(candidates) == 1:
        return candidates[0]
    losses: dict[float, list[float]] = {rate: [] for rate in candidates}
    for record in found:
        said = record.setting
        if (said["task"], said["optimizer"]) == (task, optimizer) and said["seed"] in TUNING:
            losses[said["rate"]] += record.samples["validation_loss"].values
    if any(len(values) < len(TUNING) for values in losses.values()):
        return None
    means = {rate: statistics.mean(values) for rate, values in losses.items()}
    return min(means, key=lambda rate: means[rate] if means[rate] == means[rate] else float("inf"))


def tuning(tasks: Iterable[str]) -> list[Cell]:
    """The trainings that choose rates."""
    return [Cell(task, optimizer, rate, REFERENCE, {}, 4, "iid", seed)
            for task in tasks for optimizer, rates in TASKS[task]().optimizers.items() if len(rates) > 1
            for rate in rates for seed in TUNING]


def cells(tasks: Iterable[str], names: Iterable[str], ranks: int, splits: Iterable[str], seeds: Iterable[int],
          found: Iterable[records.Record]) -> list[Cell]:
    """The trainings that compare: seed by seed, so that what is cut short has few of all, and not all of few.

    Raises:
        ValueError: a rate has not been chosen yet.
    """
    wanted, found, meant = [], list(found), rows()
    rates = {(task, optimizer): best_rate(task, optimizer, found)
             for task in tasks for optimizer in TASKS[task]().optimizers}
    for seed in seeds:
        for split in splits:
            for (task, optimizer), rate in rates.items():
                if rate is None:
                    raise ValueError(f"{task}, {optimizer}: run --tune first, on 4 ranks")
                if split == "skewed" and not TASKS[task]().classes:
                    continue
                wanted += [Cell(task, optimizer, rate, *meant[name], ranks, split, seed)
                           for name in names if serves(meant[name][0], optimizer) and meant_for(name, task)]
    return wanted


def missing(wanted: Iterable[Cell], found: Iterable[records.Record]) -> list[Cell]:
    """Those that have no record."""
    there = [record.setting for record in found]
    return [cell for cell in wanted if cell.setting() not in there]
