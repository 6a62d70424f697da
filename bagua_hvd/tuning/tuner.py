"""Measures, decides and switches for one model: a generator, resumed after some steps, and the agreement of the ranks.

    measure, settle, [ window of steps | figures posted | 3 steps | decide | 3 steps | decided alike | leave | switch ]

Everything is scheduled in steps, which are the same on all ranks. Operations are waited for three steps after posting.
The record of decisions: a line in the log, a table in a file, Horovod's table, and hvd.statistics().plans.
"""
import json
import os
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from bagua_hvd.codecs import Codec
from bagua_hvd.collectives.objects import Extremes, extremes
from bagua_hvd.core import native, variables
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.log import logger
from bagua_hvd.job.runtime import runtime
from bagua_hvd.training.buckets import Bucket, Member, partition
from bagua_hvd.training.model import Model, StepTimes, Timing
from bagua_hvd.tuning.cost import Ranks, allreduced
from bagua_hvd.tuning.hysteresis import Hysteresis
from bagua_hvd.tuning.network import Measured, measure, speeds
from bagua_hvd.tuning.predict import Part, Predictor, Window, points, total_line_bytes, window

MEASURED_AFTER, SETTLES, LATER = 2, 5, 3            # steps
CHANGED_PERCENT = 25                                # a step that differs by more: something has changed
SHARE = 100                                         # measuring again takes at most 1 / SHARE of the time
PERIOD = 40                                         # windows after which the network is measured again
LOSSES_PPM = {1: 100_000, 2: 1_000_000}             # of a gradient's norm, by Algorithm.safety
NOISE_PPM = 1_000_000                               # the same for a codec that is unbiased over its seeds
_SAMPLE = 1 << 19                                   # elements in a sample of losses
_PLANS_MAX, _STEPS_MAX = 1 << 7, 1 << 24            # what fits in 31 bits
_PPM_MAX = 2**31 - 2                                # the limit of extremes()
STATE = "choice of algorithm"
HOROVOD_HEADER = "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms," \
                 "tensor_fusion_threshold,score"


class Plan(NamedTuple):
    """One configuration of communication. algorithm: an Algorithm. bucket_bytes: None: BAGUA_DEFAULT_BUCKET_SIZE."""

    name: str
    algorithm: Any
    bucket_bytes: int | None

    def __str__(self) -> str:
        size = "" if self.bucket_bytes is None else f" in buckets of {self.bucket_bytes / variables.MIB:g} MiB"
        return self.name + size

    @property
    def codec(self) -> Codec | None:
        return getattr(self.algorithm, "codec", None)

    def too_lossy(self, ppm: int) -> bool:
        """Whether codes that lose this part of the gradients lose more than the algorithm's class allows."""
        limit = NOISE_PPM if self.codec and self.codec.random else LOSSES_PPM.get(self.algorithm.safety)
        return limit is not None and ppm > limit


class Decision(NamedTuple):
    """The decision of one window.

    Attributes:
        model: its name. step: steps made. effective: the first step by another plan. why: see Verdict; "first": the
            first decision with this network; "refused": of the plan `refused`, whose codes would lose too much.
        plan, before: the plan from then on, and in the window. measured_us: of a step in it; before_us: before the plan
            on trial. predicted_us: by `plan`. others: predictions for every plan, corrected by measurements;
            uncorrected: without that. bucket_bytes: in the window.
        error_ppm: of the codes, or with `refused` of those; 0: not known. nbytes: of all gradients. network: as
            measured.
    """

    model: str
    step: int
    effective: int
    why: str
    plan: str
    before: str
    measured_us: int
    before_us: int
    predicted_us: int
    error_ppm: int
    nbytes: int
    network: Measured
    others: dict[str, int]
    uncorrected: dict[str, int]
    bucket_bytes: int | None
    seen: float = 0.0
    refused: str = ""

    def sentence(self) -> str:
        """A message for users; "" if there is none."""
        measured, predicted = f"{self.measured_us / 1000:.4g}", f"{self.predicted_us / 1000:.4g}"
        others = {plan: us for plan, us in self.others.items() if plan != self.before}
        best = min(others, key=lambda plan: others[plan]) if others else ""
        known = {
            "first": f"{self.plan} measured {measured} ms a step" +
                     (f"; {best} predicted {others[best] / 1000:.4g}" if best else ""),
            "gain": f"{self.plan} predicted {predicted} ms a step, {self.before} measured {measured}: "
                    f"from step {self.effective} on",
            "confirmed": f"{self.plan} measured {measured} ms a step; before {self.before_us / 1000:.4g}",
            "disappointed": f"{self.before} measured {measured} ms a step, {self.plan} {self.before_us / 1000:.4g}: "
                            f"back to {self.plan} from step {self.effective} on",
            "losses": f"codes of {self.before} lose {self.error_ppm / 1e4:.3g} % of the gradients: back to {self.plan} "
                      f"from step {self.effective} on; {self.before} is not tried again",
            "refused": f"codes of {self.refused} would lose {self.error_ppm / 1e4:.3g} % of the gradients: "
                       f"{self.refused} is not tried",
        }
        return f"{self.network.describe(self.seen)}: {known[self.why]}" if self.why else ""


_begun: set[str] = set()      # files that this process has begun: records of several optimizers share them


class Record:
    """Writes decisions. file: gets a line of JSON for each window; None: BAGUA_AUTO_LOG, if that is set."""

    def __init__(self, file: str | None = None) -> None:
        self._file = file or variables.read("BAGUA_AUTO_LOG")
        self._table = variables.read("HOROVOD_AUTOTUNE_LOG")

    def write(self, decision: Decision, first: bool) -> None:
        """first: whether this is the first rank; only that one logs and writes files."""
        plan = {"plan": decision.plan, "step": decision.step, "measured_ms": decision.measured_us / 1000,
                "predicted_ms": decision.predicted_us / 1000, "network": decision.network.describe(decision.seen)}
        sentence = decision.sentence()
        known = runtime.plans.get(decision.model, {})
        runtime.plans[decision.model] = {**plan, "why": sentence or known.get("why", "")}
        if not first:
            return
        if sentence:
            logger.log(30 if decision.why == "losses" else 20, "auto: %s", sentence)
        if self._file:
            self._append(self._file, json.dumps(self._row(decision)))
        if self._table:
            self._append(self._table, self._horovod_row(decision), HOROVOD_HEADER)

    def _append(self, path: str, line: str, header: str | None = None) -> None:
        resolved = os.path.realpath(path)
        begun = resolved in _begun
        try:
            with open(path, "a" if begun else "w") as file:
                if header and not begun:
                    file.write(header + "\n")
                file.write(line + "\n")
            _begun.add(resolved)
        except OSError as error:
            logger.warning("auto: %s cannot be written (%s)", os.path.abspath(path), error.strerror)

    @staticmethod
    def _row(decision: Decision) -> dict[str, Any]:
        measured, used = decision.network.network(), decision.network.network(decision.seen)
        return {**decision._asdict(), "network": {
            "ranks": decision.network.ranks.ranks, "hosts": decision.network.ranks.hosts,
            "mbit_per_s": round(used.bytes_per_s * 8e-6, 3),
            "measured_mbit_per_s": round(measured.bytes_per_s * 8e-6, 3), "latency_ms": round(used.latency_s * 1e3, 4),
            "free_mib": decision.network.free_mib,
        }}

    @staticmethod
    def _horovod_row(decision: Decision) -> str:
        levels = int(1 < decision.network.ranks.hosts < decision.network.ranks.ranks)
        size = decision.bucket_bytes or variables.read("BAGUA_DEFAULT_BUCKET_SIZE")
        cache = int(variables.read("HOROVOD_CACHE_CAPACITY") > 0)
        return f"{levels},{levels},0,{cache},0,{size / variables.MIB:g},{decision.nbytes / decision.measured_us:.6g}"


class Tuner:
    """Chooses the plan of one model, and revises it.

    Args:
        plans: the exact one first; the same on all ranks.
        window: steps in a window. warmup: steps before the first. windows_max: then the plan stays; None: never.
        record: gets the decisions.
    Attributes:
        plan: the Plan in use. leaving: whether the next step is its last one.
    """

    def __init__(self, model: Model, plans: Sequence[Plan], window: int, warmup: int, windows_max: int | None,
                 record: Record) -> None:
        if len(plans) > _PLANS_MAX:
            raise ValueError(f"{len(plans)} plans to choose from: {_PLANS_MAX} at most")
        self._model = model
        self._plans = plans
        self._window = window
        self._warmup = warmup
        self._windows_max = windows_max
        self._record = record
        self._codecs = list(dict.fromkeys(plan.codec for plan in plans if plan.codec))
        self._names = [str(plan) for plan in plans]     # in a checkpoint: plan numbers are valid only with them
        self._kinds = [int(plan.algorithm.safety > 0) for plan in plans]
        self._hysteresis = Hysteresis(self._kinds)
        self.plan = plans[0]
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.leaving = False
        self._running = self._run()
        self._continues_in = 0          # steps until it does; 0 and less: never
        self._windows = self._since_measured = 0        # windows
        self._measured: Measured | None = None
        self._expected = 0              # us of a step, as it was when the network was measured; 0: not known
        self._spare_us = 0              # what measuring again may take
        self._carried = self._seen = 0.0    # bytes a second: by exact steps since then, and the rate in use
        self._parts: list[list[Part]] = []      # of the last window: by plan, its buckets
        self._sampling = False
        self._lost = self._candidate_lost = 0   # ppm, in this window's sample

    # ------------------------------------------------------------------------------------------------ what Auto calls

    def agreed(self) -> None:
        """Called when the ranks have agreed: all continue with the plan that was decided last. Collective; blocks.

        All ranks get the knowledge of any rank: which plans are barred, and the largest ratio of each.
        """
        model, mine, count = self._model, self._hysteresis, len(self._plans)
        if model.state.loaded(STATE):
            kept: dict[str, Any] = model.state.keep(STATE, dict, shared=True)
            mine = Hysteresis(self._kinds, **kept["choice"] if kept.get("names") == self._names else {})
        latest, *known = (largest for largest, _ in extremes(
            [min(mine.since, _STEPS_MAX - 1) * _PLANS_MAX + mine.plan, *mine.ratios, *mine.barred],
            f"{model.name}.plan", model.group))
        since, plan = divmod(latest, _PLANS_MAX)
        self._hysteresis = Hysteresis(self._kinds, plan, since, known[:count], list(map(bool, known[count:])))
        self.plan = self._plans[plan]
        self._begin_anew()
        if model.group.size() > 1 and count > 1:
            self._continues_in = max(MEASURED_AFTER, self._warmup) - 1
        self._keep()

    def sample(self, bucket: Bucket) -> None:
        """Called before a bucket is communicated. In the first step of a window, measures what codecs lose of it: the
        codec in use of one bucket, and that of the plan that may be next of all buckets."""
        if not self._sampling:
            return
        if bucket is self._model.gradients[self._windows % len(self._model.gradients)]:
            self._lost = _losses_ppm(bucket, self.plan.codec)
        if self._hysteresis.candidate is not None:
            codec = self._plans[self._hysteresis.candidate].codec
            self._candidate_lost = max(self._candidate_lost, _losses_ppm(bucket, codec))

    def stepped(self) -> None:
        """Called after each step, on all ranks. HorovodInternalError: a rank was lost."""
        self._sampling = False
        self._continues_in -= 1
        if self._continues_in == 0:
            try:
                self._continues_in = next(self._running, 0)
            except HorovodInternalError as error:
                if error.status != native.ERR_SHUTDOWN:     # else a rank has left: training ended in this step
                    raise

    # ------------------------------------------------------------------------------------ what happens between steps

    def _run(self) -> Iterator[int]:
        """Yields the number of steps until it continues."""
        measures = True
        while self._windows_max is None or self._windows < self._windows_max or self._hysteresis.before is not None:
            if measures:
                yield from self._measure()
            figures, lost, candidate_lost = yield from self._agreed_window()
            self._windows += 1
            self._since_measured += 1
            self._spare_us += figures.step * self._window // SHARE
            self._expected = self._expected or figures.step
            changed = abs(figures.step - self._expected) * 100 > CHANGED_PERCENT * self._expected
            measures = (changed or self._since_measured >= PERIOD) and self._spare_us >= 0
            # If the network has changed, and may not be measured yet, the plan stays.
            if not measures and (not changed or self.plan.too_lossy(lost)):
                before = self._hysteresis.plan
                self._decide(figures, lost, candidate_lost)
                if self._hysteresis.plan != before:
                    yield from self._switch()
        self._model.timing = None       # it would grow

    def _measure(self) -> Iterator[int]:
        found = speeds(self._codecs)        # while the next step computes
        yield 1
        measured = measure(f"{self._model.name}.measure", self._model.group, found.result())
        if self._measured is not None:
            self._spare_us -= measured.spent
        self._measured = measured
        self._expected = self._since_measured = 0
        self._carried = 0.0
        yield SETTLES

    def _agreed_window(self) -> Generator[int, None, tuple[Window, int, int]]:
        """The largest figures of all ranks in the next window with steps: times, and losses in ppm."""
        assert self._measured is not None
        steps: list[StepTimes] = []
        while not steps:
            timing = self._model.timing = Timing()
            self._sampling, self._lost, self._candidate_lost = True, 0, 0
            yield self._window
            steps = timing.steps
        members = {index: member for bucket in self._model.gradients for index, member in bucket.members.items()}
        self._parts = self._cut(members, self._measured.ranks)
        until = points(part.until for parts in self._parts for part in parts)
        mine = window(steps, list(members), [member.nbytes for member in members.values()], until)
        figures = Extremes([mine.step, mine.computing, mine.backward, self._lost, self._candidate_lost, *mine.ready],
                           f"{self._model.name}.window", self._model.group)
        yield LATER
        step, computing, backward, lost, candidate_lost, *ready = (largest for largest, _ in figures.wait())
        return Window(step, computing, backward, tuple(ready), tuple(until)), lost, candidate_lost

    def _decide(self, figures: Window, lost: int, candidate_lost: int) -> None:
        hysteresis, plans = self._hysteresis, self._plans
        assert self._measured is not None
        predicted = self.predict(figures, self._measured)
        before, before_us = hysteresis.plan, hysteresis.before_us
        candidate = None if hysteresis.candidate is None else plans[hysteresis.candidate]
        lossy = self.plan.too_lossy(lost)
        refused = [] if candidate is None or not candidate.too_lossy(candidate_lost) else [
            number for number, plan in enumerate(plans)
            if plan.codec == candidate.codec and plan.too_lossy(candidate_lost)]
        usable = [getattr(plan.algorithm, "warmup_steps", 0) <= self._model.step and
                  (plan is self.plan or _fits(parts, self._measured))       # this one's state is allocated already
                  for plan, parts in zip(plans, self._parts, strict=True)]
        step = self._model.step + 1
        verdict = hysteresis.decide(step, figures.step, predicted, usable, lossy, refused)
        self._keep()
        self._record.write(Decision(
            model=self._model.name, step=step, effective=step + LATER + 1,
            why=verdict.why or ("refused" if refused else "first" if self._since_measured == 1 else ""),
            plan=self._names[verdict.plan], before=self._names[before], measured_us=figures.step, before_us=before_us,
            predicted_us=verdict.predicted, error_ppm=candidate_lost if refused and not lossy else lost,
            nbytes=sum(member.nbytes for bucket in self._model.gradients for member in bucket.members.values()),
            network=self._measured,
            others={name: hysteresis.corrected(number, predicted) for number, name in enumerate(self._names)},
            uncorrected=dict(zip(self._names, predicted, strict=True)), bucket_bytes=plans[before].bucket_bytes,
            seen=self._seen, refused=str(candidate) if refused else "",
        ), first=self._model.group.rank() == 0)

    def _switch(self) -> Iterator[int]:
        choice = crc32(repr(self._hysteresis).encode()) % (2**31 - 2)      # with what it rests on
        decided = Extremes([choice], f"{self._model.name}.decided", self._model.group)
        yield LATER
        [(largest, smallest)] = decided.wait()
        if largest != smallest:
            logger.error("auto: ranks decided differently from equal inputs: all continue with %s", self._plans[0])
            self._hysteresis = Hysteresis(self._kinds, since=self._model.step)
            self._windows_max = 0
        self.leaving = True
        yield 1
        self.leaving = False
        self.plan = self._plans[self._hysteresis.plan]
        self._expected = 0
        yield SETTLES

    # -------------------------------------------------------------------------------------------------------- figures

    def predict(self, figures: Window, measured: Measured) -> list[int]:
        """us of a step with each plan."""
        overlaps = bool(variables.read("BAGUA_OVERLAP")) and not self._model.delay
        used = self._parts[self._plans.index(self.plan)]
        # The rate that this plan has reached: the link may have been slow while it was measured.
        seen = total_line_bytes(used, measured.ranks.ends) * 1e6 / max(1, figures.step)
        # With codes, bytes are the smaller part of a step: errors in the rest of it would distort the rate.
        if self.plan.algorithm.safety == 0:
            self._carried = Predictor(measured, self._codecs, overlaps, seen).rate(used, figures)
        self._seen = max(seen, self._carried)
        predictor = Predictor(measured, self._codecs, overlaps, self._seen)
        return [predictor.step_us(parts, figures) for parts in self._parts]

    def _cut(self, members: dict[int, Member], ranks: Ranks) -> list[list[Part]]:
        """The buckets of each plan."""
        order = {index: members[index] for index in reversed(members)}
        of_user = [list(bucket.members) for bucket in self._model.gradients] if self._model.cut_by_user else None
        cuts = {nbytes: [[members[index] for index in indices] for indices in of_user or partition(order, nbytes)]
                for nbytes in {plan.bucket_bytes for plan in self._plans}}
        return [_parts(plan, cuts[plan.bucket_bytes], ranks) for plan in self._plans]

    def _keep(self) -> None:
        """Keeps the choice for checkpoints."""
        chosen = self._hysteresis
        kept = {"names": self._names, "choice": {
            "plan": chosen.plan, "since": chosen.since, "ratios": list(chosen.ratios), "barred": list(chosen.barred)}}
        self._model.state.forget(STATE)
        self._model.state.keep(STATE, lambda: kept, shared=True)


def _parts(plan: Plan, cut: Sequence[Sequence[Member]], ranks: Ranks) -> list[Part]:
    """The Parts of a plan with these buckets."""
    whole = max(1, sum(member.nbytes for inside in cut for member in inside))
    parts, done = [], 0
    for inside in cut:
        dtype, elements = inside[0].dtype, sum(member.count for member in inside)
        done += sum(member.nbytes for member in inside)
        takes = plan.algorithm.takes(dtype)
        cost = plan.algorithm.cost(elements, dtype, ranks) if takes else allreduced(elements, dtype)
        parts.append(Part(done / whole, cost))
    return parts


def _fits(parts: Sequence[Part], measured: Measured) -> bool:
    """Whether a plan's state takes at most half of the available memory."""
    return 2 * sum(part.cost.kept for part in parts) <= measured.free_mib * variables.MIB


def _losses_ppm(bucket: Bucket, codec: Codec | None) -> int:
    """The RMS over elements of a codec's loss relative to their member's norm; without members that are not finite.

    _PPM_MAX if finite values become infinite or NaN. 0, not known, on GPUs: the backward pass would wait for the copy.
    """
    if codec is None or not codec.takes(bucket.dtype) or any(
            str(member.device) != "cpu" for member in bucket.members.values()):
        return 0
    values = bucket.read()
    finite = np.isfinite(values)
    # All of them, not only the sample: the smallest and the largest must stay finite.
    extremes = np.array([values.min(initial=0, where=finite), values.max(initial=0, where=finite)], values.dtype)
    if not np.isfinite(codec.decode(codec.encode(extremes), extremes.dtype, 2)).all():
        return _PPM_MAX
    sample = values[:_SAMPLE]
    lost = codec.decode(codec.encode(sample), sample.dtype, sample.size) - sample
    squares = elements = 0.0
    for of_member in bucket.slices():
        inside = slice(of_member.start, min(of_member.stop, sample.size))
        norm = float(np.square(values[inside], dtype=np.float64).sum()) if inside.start < inside.stop else 0.0
        if norm > 0 and np.isfinite(norm):
            squares += (inside.stop - inside.start) * float(np.square(lost[inside], dtype=np.float64).sum()) / norm
            elements += inside.stop - inside.start
    ppm = 1e6 * float(np.sqrt(squares / elements)) if elements else 0.0
    return round(ppm) if ppm < _PPM_MAX else _PPM_MAX       # NaN is not less
