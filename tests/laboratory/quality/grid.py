"""Which trainings there are: tasks, optimizers and their rates, algorithms, ranks, splits, seeds; and the margin.

Written down before anything was measured: an algorithm keeps quality where its test loss is within MARGIN of
gradient_allreduce's, in the same task with the same optimizer, rate, ranks, split and seeds, by two one-sided tests at
LEVEL. It is named without arguments, and has no rate of its own: a user changes one word.

The rate of an optimizer is the one of its candidates with which gradient_allreduce has the lowest validation loss, on
4 ranks, over the seeds TUNING, which serve nothing else; as many candidates for all.

"""
import inspect
import json
import statistics
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from bagua_hvd import algorithms, codecs
from bagua_hvd.algorithms import QAdam
from bagua_hvd.algorithms.full_steps import FullSteps
from bagua_hvd.core import variables
from tests.laboratory import records
from tests.laboratory.quality.tasks import TASKS

EXPERIMENT = "quality"
REFERENCE = "gradient_allreduce"
MARGIN = 0.05               # relative
# Tasks that are judged by accuracy, and the margin: how much of it may be missing. The loss of full gradients rises
# again on mnist1d after 500 of 2,000 steps, so that noise lowers it. Of 1,000 test series, an accuracy of 0.94 (that is
# published) has a standard error of 0.008. Written down when one seed had been trained.
ACCURACY_MARGINS = {"mnist1d": 0.02}
LEVEL = 0.05
SEEDS = (0, 1, 2, 3, 4)
TUNING = (1000,)
RANKS = (4, 8, 16)
FULL_STEP_BITS = 8              # as between hosts, though ranks are on one
SPLITS = ("iid", "skewed")
FOR_ADAM = ("qadam", "onebit_adam")
# optimizer -> what trains with it beside exact averages: MuLoCo, arXiv:2505.23725. A step's length is fixed in Muon, so
# the candidates are the same for all tasks with Adam. A task that has but one rate has the second of them.
OWN_OPTIMIZERS = {"muon": ("local_sgd", "diloco")}
OWN_RATES = (0.01, 0.02, 0.04, 0.08)
# name in tables -> (algorithm, arguments): beside the names alone, another form that the documentation speaks of.
# A codec: its function in codecs, and what that is given.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # of ranks: this host, where all are, would be one peer
    "decentralized shift_one": ("decentralized", {"peer_selection_mode": "shift_one", "hierarchical": False}),
    # What may keep quality where the names alone do not, for more bytes.
    "doublesqueeze block(4)": ("doublesqueeze", {"codec": ["block", 4]}),
    "topk 10 %": ("topk", {"ratio": 0.1}),
    # Chosen with the seed 1000 of the task that it is for.
    "diloco sparing": ("diloco", {"full_steps": 2, "communication_interval": 16}),
}
# PyTorch's hooks of DistributedDataParallel (ddp.py): in no table of losses, but in that of time to quality.
HOOKS = ("ddp_fp16", "ddp_powersgd")
# Tasks of a question of their own, which are in no comparison of all: which rows they are for; a variant, for no other.
OWN: dict[str, tuple[str, ...]] = {
    "long": (REFERENCE, "diloco sparing", "diloco", "async", "choco", "bytegrad", "rotated", "onebit_adam",
             "doublesqueeze"),
    **dict.fromkeys(("mnist1d", "book", "fine-tuned"), (REFERENCE, "bytegrad", "rotated", "powersgd", "onebit_adam",
                                                        "diloco", "async"))}


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
    if algorithm in HOOKS:
        return {}
    given = inspect.signature(type(algorithms.get(algorithm))).parameters
    full_steps = variables.TABLE["BAGUA_FULL_STEPS"].default
    unset = "full_steps" in given and given["full_steps"].default is None
    made = algorithms.get(algorithm, **({"full_steps": full_steps} if unset else {}))
    values = {each.name: getattr(made, each.name, each.default) for each in given.values()
              if each.name != "hierarchical"}       # each rank stands for a host
    if "codec" in given and given["codec"].default is None:     # the algorithm's own, which no argument has chosen
        values["codec"] = None
    # What has an argument's name and is a method is no value of it.
    values = {name: given[name].default if inspect.ismethod(value) else value for name, value in values.items()}
    if values.get("quorum", 0) is None:     # without one nobody waits for a grace
        del values["grace_s"]
    if getattr(made, "empties_errors", False):
        values["empties_errors"] = True
    if isinstance(made, FullSteps | QAdam):
        values["full_step_bits"] = FULL_STEP_BITS
    return {name: value if isinstance(value, int | float | str | None) else getattr(value, "__name__", str(value))
            for name, value in values.items()}


def with_codec(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a Cell, which JSON can say, as the algorithm takes them."""
    return {name: getattr(codecs, value[0])(*value[1:]) if name == "codec" else value
            for name, value in arguments.items()}


def rows() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name in tables -> (algorithm, arguments); the reference first."""
    names = [REFERENCE, *(name for name in algorithms.names() if name != REFERENCE)]
    return {name: (name, {}) for name in names} | VARIANTS


def trainable() -> dict[str, tuple[str, dict[str, Any]]]:
    """As rows(), of all that can be trained."""
    return rows() | {name: (name, {}) for name in HOOKS}


def optimizers(task: str) -> dict[str, tuple[float, ...]]:
    """Name -> learning rates to choose from: of the task, and, if it has Adam, those of algorithms."""
    given = TASKS[task]().optimizers
    if task in OWN or not any(name.startswith("adam") for name in given):
        return given
    rates = OWN_RATES if any(len(rates) > 1 for rates in given.values()) else OWN_RATES[1:2]
    return given | dict.fromkeys(OWN_OPTIMIZERS, rates)


def serves(algorithm: str, optimizer: str) -> bool:
    """Whether the algorithm is to go with the optimizer."""
    if optimizer in OWN_OPTIMIZERS:
        return algorithm in (REFERENCE, *OWN_OPTIMIZERS[optimizer])
    return optimizer.startswith("adam") or algorithm not in FOR_ADAM


def meant_for(row: str, task: str) -> bool:
    """Whether a row is to be trained on a task."""
    return row in OWN[task] if task in OWN else row not in VARIANTS or all(row not in rows for rows in OWN.values())


def whole(algorithm: str, arguments: dict[str, Any], then: dict[str, Any] | None = None) -> dict[str, Any]:
    """All that an algorithm is told, by the arguments and by the defaults that there were then; None: that are now.

    So a form stays what it is when it becomes the default, or was it. An argument that came later and is off: the
    training is the same.
    """
    now = defaults(algorithm)
    added = {name: value for name, value in now.items()
             if then is not None and name not in then and (value is None or value is False)}
    return added | (now if then is None else then) | arguments


def row_of(setting: dict[str, Any]) -> str | None:
    """The row whose training this is; None: of none that there is now."""
    if setting["algorithm"] not in algorithms.names():
        return None
    mine = whole(setting["algorithm"], setting["arguments"], setting["defaults"])
    return next((row for row, (algorithm, arguments) in rows().items()
                 if algorithm == setting["algorithm"] and whole(algorithm, arguments) == mine), None)


def of_hosts(record: records.Record) -> bool:
    """Whether ranks stood for hosts, if that matters: within a host low_precision_decentralized encodes nothing."""
    return (record.setting["algorithm"] != "low_precision_decentralized"
            or "BAGUA_HIERARCHY" in record.machine["environment"])


def recorded(folder: Any = records.FOLDER, **setting: Any) -> list[records.Record]:
    """The records that still count: of what rows() asks for, and, if of this Python, of the steps that there are now.

    Tasks are made of what Python ships, so that another one's have other steps.
    """
    known: dict[str, str | None] = {}

    def current(record: records.Record) -> bool:
        said = record.setting
        form = str((said["algorithm"], said["arguments"], said["defaults"]))
        if form not in known:
            known[form] = row_of(said)
        known_form = known[form] is not None or said["algorithm"] in HOOKS
        if not known_form or said["task"] not in TASKS or not serves(said["algorithm"], said["optimizer"]):
            return False
        if not of_hosts(record):
            return False
        same_python = record.machine["versions"]["Python"].startswith("{}.{}.".format(*sys.version_info))
        return said["steps"] == TASKS[said["task"]]().steps or not same_python

    return [record for record in records.read(EXPERIMENT, folder, **setting) if current(record)]


def best_rate(task: str, optimizer: str, found: Iterable[records.Record]) -> float | None:
    """The chosen rate; None: some candidate has not been tried yet. Of one there is nothing to choose."""
    candidates = optimizers(task)[optimizer]
    if len(candidates) == 1:
        return candidates[0]
    losses: dict[float, list[float]] = {rate: [] for rate in candidates}
    for record in found:
        said = record.setting
        if (said["task"], said["optimizer"]) == (task, optimizer) and said["seed"] in TUNING and said["rate"] in losses:
            losses[said["rate"]] += record.samples["validation_loss"].values
    if any(len(values) < len(TUNING) for values in losses.values()):
        return None
    means = {rate: statistics.mean(values) for rate, values in losses.items()}
    return min(means, key=lambda rate: means[rate] if means[rate] == means[rate] else float("inf"))


def tuning(tasks: Iterable[str]) -> list[Cell]:
    """The trainings that choose rates."""
    return [Cell(task, optimizer, rate, REFERENCE, {}, 4, "iid", seed)
            for task in tasks for optimizer, rates in optimizers(task).items() if len(rates) > 1
            for rate in rates for seed in TUNING]


def cells(tasks: Iterable[str], names: Iterable[str], ranks: int, splits: Iterable[str], seeds: Iterable[int],
          found: Iterable[records.Record]) -> list[Cell]:
    """The trainings that compare: seed by seed, so that what is cut short has few of all, and not all of few.

    Raises:
        ValueError: a rate has not been chosen yet.
    """
    wanted, found, names, meant = [], list(found), list(names), trainable()
    rates = {(task, optimizer): best_rate(task, optimizer, found)
             for task in tasks for optimizer in optimizers(task)}
    for seed in seeds:
        for split in splits:
            for (task, optimizer), rate in rates.items():
                exact = REFERENCE
                others = [name for name in names
                          if name != exact and serves(meant[name][0], optimizer) and meant_for(name, task)]
                # gradient_allreduce, which comes by itself, is no reason to train with Muon.
                asked = exact in names and optimizer not in OWN_OPTIMIZERS
                if not (others or asked) or (split == "skewed" and not TASKS[task]().classes):
                    continue
                if rate is None:
                    raise ValueError(f"{task}, {optimizer}: run --tune first, on 4 ranks")
                wanted += [Cell(task, optimizer, rate, *meant[name], ranks, split, seed) for name in (exact, *others)]
    return wanted


def missing(wanted: Iterable[Cell], found: Iterable[records.Record]) -> list[Cell]:
    """Those that have no record."""
    there = {_identity(record.setting) for record in found}
    return [cell for cell in wanted if _identity(cell.setting()) not in there]


def _identity(setting: dict[str, Any]) -> str:
    """Equal for equal trainings."""
    told = whole(setting["algorithm"], setting["arguments"], setting["defaults"])
    rest = {name: value for name, value in setting.items() if name not in ("arguments", "defaults")}
    return json.dumps([rest, told], sort_keys=True)
