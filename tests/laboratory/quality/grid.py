"""The list of trainings: tasks, optimizers and their rates, algorithms, ranks, splits, seeds; and the margin.

Fixed before any measurement: an algorithm keeps quality if its test loss is within MARGIN of gradient_allreduce's, in
the same task with the same optimizer, rate, ranks, split and seeds, by two one-sided tests at LEVEL. It has default
arguments, and no rate of its own: a user changes one word.

The rate of an optimizer is the candidate with which gradient_allreduce has the lowest validation loss, on 4 ranks, over
the seeds TUNING, which are not used otherwise; all optimizers have equally many candidates.
"""
import inspect
import json
import re
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
# Tasks that are judged by accuracy, with the permitted loss of accuracy. On mnist1d the loss of full gradients rises
# again after 500 of 2,000 steps, so that noise lowers it. With 1,000 test series, an accuracy of 0.94 (as published)
# has a standard error of 0.008. Fixed when one seed had been trained.
ACCURACY_MARGINS = {"mnist1d": 0.02}
LEVEL = 0.05
SEEDS = (0, 1, 2, 3, 4)
TUNING = (1000,)
RANKS = (4, 8, 16)
FULL_STEP_BITS = 8              # as between hosts, though all ranks are on one
SPLITS = ("iid", "skewed")
# Arguments that an algorithm has no more, with the value that it still behaves as: records with it count.
REMOVED: dict[str, dict[str, Any]] = {"async": {"peer_selection_mode": "all", "codec": None}}
FOR_ADAM = ("qadam", "onebit_adam")
# optimizer -> algorithms that train with it besides exact averages: MuLoCo, arXiv:2505.23725. Muon's steps have a fixed
# length, so all tasks with Adam have the same candidates. A task with a single rate uses the second of them.
OWN_OPTIMIZERS = {"muon": ("local_sgd", "diloco")}
OWN_RATES = (0.01, 0.02, 0.04, 0.08)
# name in tables -> (algorithm, arguments): other variants that the documentation mentions. A codec: its function in
# codecs, and that function's arguments.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # over ranks: this host, with all ranks, would be one peer
    "decentralized shift_one": ("decentralized", {"peer_selection_mode": "shift_one", "hierarchical": False}),
    # Candidates for keeping quality where the default arguments do not, with more bytes.
    "doublesqueeze block(4)": ("doublesqueeze", {"codec": ["block", 4]}),
    "topk 10 %": ("topk", {"ratio": 0.1}),
    # Chosen with the seed 1000 of its task.
    "diloco sparing": ("diloco", {"full_steps": 2, "communication_interval": 16}),
}
# PyTorch's hooks of DistributedDataParallel (ddp.py): not in tables of losses, only in that of time to quality.
HOOKS = ("ddp_fp16", "ddp_powersgd")
# Tasks for separate questions, left out of comparisons over all tasks, and their rows; a variant is for no other task.
OWN: dict[str, tuple[str, ...]] = {
    "long": (REFERENCE, "diloco sparing", "diloco", "async", "choco", "bytegrad", "rotated", "onebit_adam",
             "doublesqueeze"),
    **dict.fromkeys(("mnist1d", "book", "fine-tuned"), (REFERENCE, "bytegrad", "rotated", "powersgd", "onebit_adam",
                                                        "diloco", "async"))}


class Cell(NamedTuple):
    """One training. task, optimizer: of tasks.TASKS. arguments: those given to the algorithm."""

    task: str
    optimizer: str
    rate: float
    algorithm: str
    arguments: dict[str, Any]
    ranks: int
    split: str
    seed: int

    def setting(self) -> dict[str, Any]:
        """The setting in its record: includes default arguments, so that another default is another training."""
        return self._asdict() | {"defaults": defaults(self.algorithm), "steps": TASKS[self.task]().steps}


def defaults(algorithm: str) -> dict[str, Any]:
    """An algorithm's default arguments and other default behaviour, as JSON values, independent of the environment."""
    if algorithm in HOOKS:
        return {}
    given = inspect.signature(type(algorithms.get(algorithm))).parameters
    full_steps = variables.TABLE["BAGUA_FULL_STEPS"].default
    unset = "full_steps" in given and given["full_steps"].default is None
    made = algorithms.get(algorithm, **({"full_steps": full_steps} if unset else {}))
    values = {each.name: getattr(made, each.name, each.default) for each in given.values()
              if each.name != "hierarchical"}       # each rank acts as a host
    if "codec" in given and given["codec"].default is None:     # the algorithm's own, which depends on no argument
        values["codec"] = None
    # A method with the name of an argument is not its value.
    values = {name: given[name].default if inspect.ismethod(value) else value for name, value in values.items()}
    if values.get("quorum", 0) is None:     # without a quorum no rank waits for a grace period
        del values["grace_s"]
    if getattr(made, "empties_errors", False):
        values["empties_errors"] = True
    if isinstance(made, FullSteps | QAdam):
        values["full_step_bits"] = FULL_STEP_BITS
    return {name: value if isinstance(value, int | float | str | None) else getattr(value, "__name__", str(value))
            for name, value in values.items()}


def with_codec(arguments: dict[str, Any]) -> dict[str, Any]:
    """A Cell's arguments, which are JSON values, as the algorithm takes them."""
    return {name: getattr(codecs, value[0])(*value[1:]) if name == "codec" else value
            for name, value in arguments.items()}


def rows() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name in tables -> (algorithm, arguments); the reference comes first."""
    names = [REFERENCE, *(name for name in algorithms.names() if name != REFERENCE)]
    return {name: (name, {}) for name in names} | VARIANTS


def trainable() -> dict[str, tuple[str, dict[str, Any]]]:
    """Like rows(), with everything that can be trained."""
    return rows() | {name: (name, {}) for name in HOOKS}


def optimizers(task: str) -> dict[str, tuple[float, ...]]:
    """Name -> candidate learning rates: those of the task, and, if it has Adam, those of OWN_OPTIMIZERS."""
    given = TASKS[task]().optimizers
    if task in OWN or not any(name.startswith("adam") for name in given):
        return given
    rates = OWN_RATES if any(len(rates) > 1 for rates in given.values()) else OWN_RATES[1:2]
    return given | dict.fromkeys(OWN_OPTIMIZERS, rates)


def serves(algorithm: str, optimizer: str) -> bool:
    """Whether the algorithm is trained with the optimizer."""
    if optimizer in OWN_OPTIMIZERS:
        return algorithm in (REFERENCE, *OWN_OPTIMIZERS[optimizer])
    return optimizer.startswith("adam") or algorithm not in FOR_ADAM


def meant_for(row: str, task: str) -> bool:
    """Whether the row is trained on the task."""
    return row in OWN[task] if task in OWN else row not in VARIANTS or all(row not in rows for rows in OWN.values())


def whole(algorithm: str, arguments: dict[str, Any], then: dict[str, Any] | None = None) -> dict[str, Any]:
    """All arguments of an algorithm: those given, and the defaults `then`; None: the current defaults.

    So a variant keeps its identity if it is, or was, the default. An argument that was added later and is off does not
    change the training, nor does one of REMOVED.
    """
    now = defaults(algorithm)
    added = {name: value for name, value in now.items()
             if then is not None and name not in then and (value is None or value is False)}
    before = now if then is None else {name: value for name, value in then.items()
                                       if (name, value) not in REMOVED.get(algorithm, {}).items()}
    # The core's number of a codec may change, its name does not.
    return {name: re.sub(r"number=\d+, ", "", value) if isinstance(value, str) else value
            for name, value in (added | before | arguments).items()}


def row_of(setting: dict[str, Any]) -> str | None:
    """The row of this training; None: no current one."""
    if setting["algorithm"] not in algorithms.names():
        return None
    mine = whole(setting["algorithm"], setting["arguments"], setting["defaults"])
    return next((row for row, (algorithm, arguments) in rows().items()
                 if algorithm == setting["algorithm"] and whole(algorithm, arguments) == mine), None)


def of_hosts(record: records.Record) -> bool:
    """Whether ranks acted as hosts, if it matters: within a host low_precision_decentralized encodes nothing."""
    return (record.setting["algorithm"] != "low_precision_decentralized"
            or "BAGUA_HIERARCHY" in record.machine["environment"])


def recorded(folder: Any = records.FOLDER, **setting: Any) -> list[records.Record]:
    """The records that still count: of trainings in rows(), with the current number of steps if they used this Python.

    Tasks are made from Python's own files, so another version has different steps.
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
    """The chosen rate; None: some candidate has not been tried yet. A single candidate needs no trial."""
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
    """The trainings for choosing rates."""
    return [Cell(task, optimizer, rate, REFERENCE, {}, 4, "iid", seed)
            for task in tasks for optimizer, rates in optimizers(task).items() if len(rates) > 1
            for rate in rates for seed in TUNING]


def cells(tasks: Iterable[str], names: Iterable[str], ranks: int, splits: Iterable[str], seeds: Iterable[int],
          found: Iterable[records.Record]) -> list[Cell]:
    """The trainings for comparisons, ordered by seed, so that an interrupted run has a few seeds of all trainings.

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
                # gradient_allreduce, which is always added, does not alone require training with Muon.
                asked = exact in names and optimizer not in OWN_OPTIMIZERS
                if not (others or asked) or (split == "skewed" and not TASKS[task]().classes):
                    continue
                if rate is None:
                    raise ValueError(f"{task}, {optimizer}: run --tune first, on 4 ranks")
                wanted += [Cell(task, optimizer, rate, *meant[name], ranks, split, seed) for name in (exact, *others)]
    return wanted


def missing(wanted: Iterable[Cell], found: Iterable[records.Record]) -> list[Cell]:
    """Those without a record."""
    there = {_identity(record.setting) for record in found}
    return [cell for cell in wanted if _identity(cell.setting()) not in there]


def _identity(setting: dict[str, Any]) -> str:
    """A text that is equal for equal trainings."""
    told = whole(setting["algorithm"], setting["arguments"], setting["defaults"])
    rest = {name: value for name, value in setting.items() if name not in ("arguments", "defaults")}
    return json.dumps([rest, told], sort_keys=True)
