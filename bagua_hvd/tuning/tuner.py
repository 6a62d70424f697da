"""Measures, decides and switches for one model: actions scheduled by step, and the agreement of the ranks.

    measure, settle, [ window of steps | figures posted | 3 steps | decide | 3 steps | decided alike | leave | switch ]

Everything is scheduled in steps, which are the same on all ranks. Operations are waited for three steps after posting.
"""
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from bagua_hvd.collectives.facts import Extremes, extremes
from bagua_hvd.core import native, variables
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.log import logger
from bagua_hvd.training.buckets import Bucket, Member, partition
from bagua_hvd.training.model import Model
from bagua_hvd.training.timing import Timing
from bagua_hvd.tuning.cost import Ranks, allreduced
from bagua_hvd.tuning.hysteresis import Hysteresis, Verdict
from bagua_hvd.tuning.network import Measured, measure
from bagua_hvd.tuning.predict import Part, Predictor, total_line_bytes
from bagua_hvd.tuning.record import Decision, Record
from bagua_hvd.tuning.speeds import Speeds
from bagua_hvd.tuning.window import Window, points, window

MEASURED_AFTER, SETTLES, LATER = 2, 5, 3            # steps
CHANGED_PERCENT = 25                                # a step that differs by more: something has changed
SHARE = 100                                         # measuring again takes at most 1 / SHARE of the time
PERIOD = 40                                         # windows after which the network is measured again
LOSSES_PPM = {1: 100_000, 2: 1_000_000}             # of a gradient's norm, by Algorithm.safety
NOISE_PPM = 1_000_000                               # the same for a codec that is unbiased over its seeds
_SAMPLE = 1 << 18                                   # elements in a sample of losses
_PLANS_MAX, _STEPS_MAX = 1 << 7, 1 << 24            # what fits in 31 bits
_PPM_MAX = 2**31 - 2                                # the limit of extremes()
STATE = "choice of algorithm"


class Plan(NamedTuple):
    """One configuration of communication. algorithm: an Algorithm. bucket_bytes: None: BAGUA_DEFAULT_BUCKET_SIZE."""

    name: str
    algorithm: Any
    bucket_bytes: int | None

    def __str__(self) -> str:
        size = "" if self.bucket_bytes is None else f" in buckets of {self.bucket_bytes / variables.MIB:g} MiB"
        return self.name + size


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
        self._codecs = list(dict.fromkeys(plan.algorithm.codec for plan in plans if hasattr(plan.algorithm, "codec")))
        self._names = [str(plan) for plan in plans]     # in a checkpoint: plan numbers are valid only with them
        self._kinds = tuple(int(plan.algorithm.safety > 0) for plan in plans)
        self._hysteresis = Hysteresis(kinds=self._kinds)
        self.plan = plans[0]
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.leaving = False
        self._agenda: dict[int, Callable[[], None]] = {}
        self._steps = 0
        self._windows = 0
        self._posted: Any = None
        self._measured: Measured | None = None
        self._speeds: Speeds | None = None          # being measured
        self._expected = 0              # us of a step, as it was when the network was measured
        self._spent = self._elapsed = 0     # us of measuring again, and of training until step `_counted`
        self._counted = 0
        self._since_measured = 0        # windows
        self._carried = self._seen = 0.0    # bytes a second: by exact steps since then, and the rate in use
        self._parts: list[list[Part]] = []      # of the last window: by plan, its buckets
        self._until: list[float] = []           # of its figures
        self._error_ppm = -1            # -1: not measured yet in this window
        self._candidate_ppm = 0         # the most that the candidate's codec would have lost in this window
        self._candidate_step = -1       # the step of this window in which it was measured

    # ------------------------------------------------------------------------------------------------ what Auto calls

    def agreed(self) -> None:
        """Called when the ranks have agreed: all continue with the plan that was decided last. Collective; blocks.

        All ranks get the knowledge of any rank: which plans are barred, and the largest ratio of each.
        """
        model, mine, plans = self._model, self._hysteresis, range(len(self._plans))
        if model.state.loaded(STATE):
            kept = model.state.keep(STATE, dict, shared=True)
            mine = Hysteresis.of_dict(kept if kept.get("plans") == self._names else {})
        since = 0 if mine.since is None else min(mine.since, _STEPS_MAX - 2) + 1
        known = [since * _PLANS_MAX + mine.plan, *(int(plan in mine.barred) for plan in plans),
                 *(mine.ratios.get(plan, 0) for plan in plans)]
        latest, *known = (largest for largest, _ in extremes(known, f"{model.name}.plan", model.group))
        barred, ratios = known[:len(plans)], known[len(plans):]
        since, plan = divmod(latest, _PLANS_MAX)
        self._hysteresis = Hysteresis(
            plan=plan, since=since - 1 if since else None, kinds=self._kinds,
            ratios={plan: ratio for plan, ratio in enumerate(ratios) if ratio},
            barred={plan for plan in plans if barred[plan]})
        self.plan = self._plans[plan]
        self._begin_anew()
        if model.group.size() > 1 and len(self._plans) > 1:
            model.timing = Timing()
            self._agenda[max(MEASURED_AFTER, self._warmup)] = self._measure
        self._keep()

    def sample(self, bucket: Bucket) -> None:
        """Called before a bucket is communicated: sometimes measures the codec's losses on it, and codecs' speeds."""
        if self._speeds is None and self._agenda.get(self._steps + 1) == self._measure:
            self._speeds = Speeds(self._codecs)         # during the backward pass
        self._sample_candidate(bucket)
        algorithm = self.plan.algorithm
        if self._error_ppm >= 0 or not hasattr(algorithm, "codec") or self._model.timing is None:
            return
        buckets = self._model.gradients
        if buckets[self._windows % len(buckets)] is not bucket or not algorithm.takes(bucket.dtype):
            return
        self._error_ppm = _losses_ppm(bucket, algorithm.codec)

    def _sample_candidate(self, bucket: Bucket) -> None:
        """Measures, in one step of a window, what the codec of the plan that may be next loses of all buckets."""
        candidate = self._hysteresis.candidate
        codec = getattr(self._plans[candidate].algorithm, "codec", None) if candidate >= 0 else None
        if codec is None or not codec.takes(bucket.dtype) or self._candidate_step not in (-1, self._steps):
            return
        self._candidate_step = self._steps
        self._candidate_ppm = max(self._candidate_ppm, _losses_ppm(bucket, codec))

    def _with_codec_of(self, candidate: int, error_ppm: int) -> list[int]:
        """The plans that would lose too much: none, or the candidate and others with its codec."""
        if candidate < 0 or not _lossy(self._plans[candidate], error_ppm):
            return []
        codec = self._plans[candidate].algorithm.codec
        return [number for number, plan in enumerate(self._plans)
                if getattr(plan.algorithm, "codec", None) == codec and _lossy(plan, error_ppm)]

    def stepped(self) -> None:
        """Called after each step, on all ranks.

        Raises:
            HorovodInternalError: a rank was lost.
        """
        self._steps += 1
        act = self._agenda.pop(self._steps, None)
        if act is not None:
            act()

    # ----------------------------------------------------------------------------------------------------- the agenda

    def _in(self, steps: int, act: Callable[[], None]) -> None:
        self._agenda[self._steps + steps] = act

    def _compare(self, numbers: list[int], what: str, then: Callable[[], None]) -> None:
        """Posts a comparison, for which `then` waits; nothing if a rank has left: training ended in this step."""
        try:
            self._posted = Extremes(numbers, f"{self._model.name}.{what}", self._model.group)
        except HorovodInternalError as error:
            if error.status != native.ERR_SHUTDOWN:
                raise
        else:
            self._in(LATER, then)

    def _measure(self) -> None:
        speeds, self._speeds = (self._speeds or Speeds(self._codecs)).wait(), None
        measured = measure(f"{self._model.name}.measure", self._model.group, speeds)
        if self._measured is not None:
            self._spent += measured.spent
        self._measured = measured
        self._expected = self._since_measured = 0
        self._carried = 0.0
        self._in(SETTLES, self._begin_window)

    def _begin_window(self) -> None:
        assert self._model.timing is not None
        self._model.timing.restart()
        self._error_ppm = self._candidate_step = -1
        self._candidate_ppm = 0
        self._in(self._window, self._post)

    def _next_window(self, later: int = 0) -> None:
        more = self._windows_max is None or self._windows < self._windows_max
        if more or self._hysteresis.before >= 0:        # a trial ends first
            if later:
                self._in(later, self._begin_window)
            else:
                self._begin_window()

    def _post(self) -> None:
        assert self._model.timing is not None and self._measured is not None
        steps = self._model.timing.take()
        if not steps:
            self._begin_window()
            return
        members = {index: member for bucket in self._model.gradients for index, member in bucket.members.items()}
        self._parts = self._cut(self._measured.ranks)
        self._until = points(part.until for parts in self._parts for part in parts)
        figures = window(steps, list(members), [member.nbytes for member in members.values()], self._until)
        numbers = [figures.step, figures.computing, figures.backward, *figures.ready,
                   max(0, self._error_ppm), self._candidate_ppm]
        self._compare(numbers, "window", self._decide)

    def _decide(self) -> None:
        step, computing, backward, *ready, error_ppm, candidate_ppm = (largest for largest, _ in self._posted.wait())
        figures = Window(step, computing, backward, tuple(ready), tuple(self._until))
        assert self._measured is not None
        self._windows += 1
        self._since_measured += 1
        self._elapsed += figures.step * (self._steps - self._counted)
        self._counted = self._steps
        changed = abs(figures.step - self._expected) * 100 > CHANGED_PERCENT * self._expected
        lossy = _lossy(self.plan, error_ppm)
        if not self._expected:
            self._expected = figures.step
        elif changed or self._since_measured >= PERIOD:
            if self._spent * SHARE <= self._elapsed:
                self._in(1, self._measure)
                return
            if changed and not lossy:       # the network has changed: keep the plan until it may be measured again
                self._next_window()
                return
        predicted = self.predict(figures, self._measured)
        before, before_us = self._hysteresis.plan, self._hysteresis.before_us
        candidate = self._hysteresis.candidate
        refused = self._with_codec_of(candidate, candidate_ppm)
        usable = [getattr(plan.algorithm, "warmup_steps", 0) <= self._model.step and
                  (plan is self.plan or _fits(parts, self._measured))       # this one's state is allocated already
                  for plan, parts in zip(self._plans, self._parts, strict=True)]
        verdict = self._hysteresis.decide(self._model.step + 1, figures.step, predicted, usable, lossy, refused)
        self._record_decision(verdict, before, before_us, figures, predicted,
                              candidate_ppm if refused and not lossy else error_ppm,
                              self._plans[candidate] if refused else None)
        self._keep()
        if verdict.plan == before:
            self._next_window()
            return
        self._compare([crc32(repr(self._hysteresis.as_dict()).encode()) % (2**31 - 2)], "decided", self._check)

    def _check(self) -> None:
        [(largest, smallest)] = self._posted.wait()
        if largest != smallest:
            logger.error("auto: ranks decided differently from equal inputs: all continue with %s", self._plans[0])
            self._hysteresis = Hysteresis(since=self._model.step, kinds=self._kinds)
            self._windows_max = 0
        self.leaving = True
        self._in(1, self._switch)

    def _switch(self) -> None:
        self.leaving = False
        self.plan = self._plans[self._hysteresis.plan]
        self._expected = 0
        self._next_window(SETTLES)

    # -------------------------------------------------------------------------------------------------------- figures

    def predict(self, figures: Window, measured: Measured) -> list[int]:
        """us of a step with each plan."""
        overlaps = bool(variables.read("BAGUA_OVERLAP")) and not self._model.delay
        used = self._parts[self._plans.index(self.plan)]
        # The rate that this plan has reached: the link may have been slow while it was measured.
        seen = total_line_bytes(used, measured.ranks.ends) * 1e6 / max(1, figures.step)
        predictor = Predictor(measured, self._codecs, overlaps, seen)
        # With codes, bytes are the smaller part of a step: errors in the rest of it would distort the rate.
        if self.plan.algorithm.safety == 0:
            self._carried = predictor.rate(used, figures)
        self._seen = max(seen, self._carried)
        if self._seen > seen:
            predictor = Predictor(measured, self._codecs, overlaps, self._seen)
        return [predictor.step_us(parts, figures) for parts in self._parts]

    def _cut(self, ranks: Ranks) -> list[list[Part]]:
        """The buckets of each plan."""
        members = {index: member for bucket in self._model.gradients for index, member in bucket.members.items()}
        order = {index: members[index] for index in reversed(members)}
        of_user = [list(bucket.members) for bucket in self._model.gradients] if self._model.cut_by_user else None
        cuts = {nbytes: [[members[index] for index in indices] for indices in of_user or partition(order, nbytes)]
                for nbytes in {plan.bucket_bytes for plan in self._plans}}
        return [_parts(plan, cuts[plan.bucket_bytes], ranks) for plan in self._plans]

    def _keep(self) -> None:
        self._model.state.forget(STATE)
        kept = {**self._hysteresis.as_dict(), "plans": self._names}
        self._model.state.keep(STATE, lambda: kept, shared=True)

    def _record_decision(self, verdict: Verdict, before: int, before_us: int, figures: Window, predicted: Sequence[int],
                         error_ppm: int, refused: Plan | None) -> None:
        assert self._measured is not None
        nbytes = sum(member.nbytes for bucket in self._model.gradients for member in bucket.members.values())
        self._record.write(Decision(
            model=self._model.name, step=self._model.step + 1, effective=self._model.step + 1 + LATER + 1,
            why=verdict.why or ("refused" if refused else "first" if self._since_measured == 1 else ""),
            plan=str(self._plans[verdict.plan]), before=str(self._plans[before]), measured_us=figures.step,
            before_us=before_us, predicted_us=verdict.predicted, error_ppm=error_ppm, nbytes=nbytes,
            network=self._measured,
            others={str(plan): self._hysteresis.corrected(place, predicted)
                    for place, plan in enumerate(self._plans)},
            uncorrected=dict(zip(map(str, self._plans), predicted, strict=True)),
            bucket_bytes=self._plans[before].bucket_bytes, seen=self._seen, refused=str(refused or ""),
        ), first=self._model.group.rank() == 0)


def _lossy(plan: Plan, error_ppm: int) -> bool:
    """Whether a plan's codes lose more than its class allows."""
    codec = getattr(plan.algorithm, "codec", None)
    limit = NOISE_PPM if codec is not None and codec.random else LOSSES_PPM.get(plan.algorithm.safety)
    return limit is not None and error_ppm > limit


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


def _losses_ppm(bucket: Bucket, codec: Any) -> int:
    """The RMS over elements of a codec's loss relative to their member's norm; without members that are not finite.

    _PPM_MAX if finite values become infinite or NaN. 0, not known, on GPUs: the backward pass would wait for the copy.
    """
    if any(str(member.device) != "cpu" for member in bucket.members.values()):
        return 0
    values = bucket.read()
    if not _holds_extremes(values, codec):
        return _PPM_MAX
    lost = np.empty_like(values)
    for begin in range(0, values.size, _SAMPLE):
        part = values[begin:begin + _SAMPLE]
        lost[begin:begin + _SAMPLE] = codec.decode(codec.encode(part), part.dtype, part.size) - part
        if begin:
            break               # enough
    known = min(values.size, 2 * _SAMPLE)
    squares = elements = 0.0
    for of_member in bucket.slices():
        inside = slice(of_member.start, min(of_member.stop, known))
        norm = float(np.square(values[inside], dtype=np.float64).sum()) if inside.start < inside.stop else 0.0
        if norm > 0 and np.isfinite(norm):
            squares += (inside.stop - inside.start) * float(np.square(lost[inside], dtype=np.float64).sum()) / norm
            elements += inside.stop - inside.start
    ppm = 1e6 * float(np.sqrt(squares / elements)) if elements else 0.0
    return round(ppm) if ppm < _PPM_MAX else _PPM_MAX       # NaN is not less


def _holds_extremes(values: np.ndarray, codec: Any) -> bool:
    """Whether the smallest and the largest of the finite values stay finite: all of them, not only of the sample."""
    if not values.size:
        return True
    extremes = np.array([values.min(), values.max()])
    if not np.isfinite(extremes).all():
        finite = values[np.isfinite(values)]
        extremes = np.array([finite.min(), finite.max()] if finite.size else [0, 0], values.dtype)
    return bool(np.isfinite(codec.decode(codec.encode(extremes), extremes.dtype, 2)).all())
