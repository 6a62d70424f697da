"""Auto: selects the fastest algorithm that the user allows, for the current network, model and processor.

    opt = hvd.DistributedOptimizer(opt, algorithm="auto")                          only exact gradients
    hvd.algorithms.Auto(up_to="E1")                                                also codecs without memory
    hvd.algorithms.Auto(allow=["bytegrad", hvd.algorithms.DoubleSqueeze()])        also these

All hooks are those of the chosen algorithm. Selection: tuning/tuner.py; docs/decisions/algorithms.md.

Wire: that of the algorithm chosen; at most 424 bytes more in each window of about 25 steps; and measurements: some
allreduces of up to 8 MiB at the start, later repeated within 1 % of the run time.
State: that of the algorithm chosen, and the plan, equal on all ranks.
"""
import json
import os
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua_hvd.algorithms.base import Algorithm, Safety, choose, communication, positive
from bagua_hvd.algorithms.bytegrad import ByteGrad
from bagua_hvd.algorithms.gradient_allreduce import GradientAllReduce
from bagua_hvd.core import native, variables
from bagua_hvd.core.variables import MIB
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import block, float16, rotated
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Pending
from bagua_hvd.tuning.cost import Ranks
from bagua_hvd.tuning.tuner import Plan, Record, Tuner

EXACT = "gradient_allreduce"
# The algorithms that each class adds. They need no argument from the user.
DEFAULTS: dict[Safety, dict[str, dict[str, Any]]] = {
    Safety.E1: {"float16": {"codec": float16}, "block(8)": {"codec": block(8)},
                "rotated(2)": {"codec": rotated(2)}},
    Safety.E2: {"block(4) with error feedback": {"codec": block(4), "error_feedback": True}},
}
BUCKET_BYTES = None, 2 * MIB, 40 * MIB
WINDOW = 25

NO_CLASS = "up_to={up_to!r}: expected E0, E1 or E2; algorithms of E3 and E4 have arguments that Auto cannot " \
           "choose: list those algorithms in allow"
DELAYED = "delay=1 with {names}: delay amplifies what codecs of few bits lose, and training may diverge " \
          "(arXiv:2507.17346); leave out delay, or allow only codecs of 8 bits or more"
NOT_KNOWN = "Auto cannot choose {name}: {why}"


class Auto(Algorithm):
    """Chooses among algorithms, and revises its choice.

    Args:
        allow: names or Algorithms that may be chosen besides exact gradient averaging.
        up_to: "E0", "E1" or "E2": also allows the default algorithms up to this class.
        plan: a file written by save_plan(), or its contents: this plan is used, and nothing is measured.
        log: a file, to which the first rank writes one line of JSON for each decision. None: BAGUA_AUTO_LOG.
        average: False for the sum.
        window: steps between decisions, 1 or more. None: HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE, else 25.
    Raises:
        ValueError: an algorithm cannot be chosen (the message says why), or the plan's algorithm is not allowed.
    """

    counts_steps = True

    def __init__(self, allow: Sequence[str | Algorithm | type[Algorithm]] = (), up_to: str = "E0",
                 plan: str | os.PathLike[str] | dict[str, Any] | None = None, log: str | None = None,
                 average: bool = True, window: int | None = None) -> None:
        if up_to not in ("E0", "E1", "E2"):
            raise ValueError(NO_CLASS.format(up_to=up_to))
        self.average = average
        named: list[tuple[str, Algorithm]] = [(EXACT, choose(GradientAllReduce(average=average), average))]
        for safety, added in DEFAULTS.items():
            if safety <= Safety[up_to]:
                named += [(name, choose(ByteGrad(average=average, **arguments), average))
                          for name, arguments in added.items()]
        for each in [allow] if isinstance(allow, (str, Algorithm, type)) else allow:
            algorithm = choose(each, average)
            name = each if isinstance(each, str) else type(algorithm).__name__
            taken = sum(other == name or other.startswith(f"{name} #") for other, _ in named)
            if not isinstance(algorithm, GradientAllReduce):
                named.append((f"{name} #{taken + 1}" if taken else name, algorithm))
        for name, algorithm in named:
            why = _why_not(algorithm)
            if why:
                raise ValueError(NOT_KNOWN.format(name=name, why=why))
        # The mildest first: it wins among equally fast ones.
        named[1:] = sorted(named[1:], key=lambda pair: pair[1].safety)
        self.algorithms = dict(named)
        self._pinned = None if plan is None else self._read(plan)
        self._window = variables.read("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE") if window is None else \
            positive("window", window)
        self._log = log
        self._tuners: weakref.WeakKeyDictionary[Model, Tuner] = weakref.WeakKeyDictionary()
        every = self.algorithms.values()
        self.safety = max(algorithm.safety for algorithm in every)
        self.dense_only = any(algorithm.dense_only for algorithm in every)
        self.remembers_gradients = any(algorithm.remembers_gradients for algorithm in every)

    def _read(self, plan: str | os.PathLike[str] | dict[str, Any]) -> Plan:
        known = plan if isinstance(plan, dict) else json.loads(Path(plan).read_text())
        name = known.get("algorithm")
        if name not in self.algorithms:
            raise ValueError(f"the plan is of {name!r}, which is not allowed here: {', '.join(self.algorithms)} are")
        return Plan(name, self.algorithms[name], known.get("bucket_bytes"))

    def _tuner(self, model: Model) -> Tuner:
        tuner = self._tuners.get(model)
        if tuner is None:
            window = self._window or WINDOW
            samples = variables.read("HOROVOD_AUTOTUNE_WARMUP_SAMPLES")
            tuner = self._tuners[model] = Tuner(        # which must not keep its key alive
                weakref.proxy(model), self._plans(model), window, window * samples if samples is not None else 0,
                variables.read("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"), Record(self._log))
        return tuner

    def _plans(self, model: Model) -> list[Plan]:
        if self._pinned is not None:
            return [self._pinned]
        fixed = model.cut_by_user or variables.given("BAGUA_DEFAULT_BUCKET_SIZE")
        return [Plan(name, algorithm, size) for name, algorithm in self.algorithms.items()
                for size in (BUCKET_BYTES[:1] if fixed else BUCKET_BYTES)]

    def plan(self, model: Model) -> dict[str, Any]:
        """The plan in use for a model, as a dict for Auto(plan=...)."""
        used = self._tuner(model).plan
        return {"algorithm": used.name, "bucket_bytes": used.bucket_bytes}

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan in use for this process's first model to a file for Auto(plan=path)."""
        model = min(self._tuners, key=lambda model: model.name, default=None)
        if model is None:
            raise ValueError("no optimizer uses this Auto: make a DistributedOptimizer with it first")
        Path(path).write_text(json.dumps(self.plan(model)) + "\n")

    @property
    def gradients_only(self) -> bool:
        return all(algorithm.gradients_only for algorithm in self.algorithms.values())

    def prepare(self, model: Model) -> None:
        strong = [name for name, algorithm in self.algorithms.items()
                  if getattr(algorithm, "codec", float16).bits(native.FLOAT32) < 8]
        if model.delay and strong:
            warnings.warn(DELAYED.format(names=", ".join(strong)), stacklevel=2)
        for algorithm in self.algorithms.values():
            algorithm.prepare(model)

    def agreed(self, model: Model) -> None:
        self._tuner(model).agreed()

    def bucket_bytes(self, model: Model) -> int | None:
        return self._tuner(model).plan.bucket_bytes

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Pending:
        if bucket.model is None:
            return self.algorithms[EXACT].communicate(bucket, group)
        tuner = self._tuner(bucket.model)
        tuner.sample(bucket)
        return communication(tuner.plan.algorithm, bucket.dtype, last=tuner.leaving)(bucket, group)

    def after_step(self, model: Model) -> None:
        self._tuner(model).stepped()


def _why_not(algorithm: Algorithm) -> str:
    """Why Auto cannot choose an algorithm; "" if it can."""
    if isinstance(algorithm, Auto):
        return "it is itself an Auto"
    if algorithm.uses_adam or algorithm.replaces_step:
        return "it makes the optimizer's steps, and leaves Adam's state different from what Adam itself would have"
    if getattr(algorithm, "momentum", 0):
        return ("with momentum of its own it replaces the optimizer's, and exact averages would have none: set "
                "momentum=0")
    if algorithm.models_differ or algorithm.asynchronous:
        return "leaving it would need the optimizer's state to be made equal on all ranks, too"
    if algorithm.cost(1, native.FLOAT32, Ranks(2, 1)) is None:
        return "its cost is unknown: it does not implement cost()"
    return ""
