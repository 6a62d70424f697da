"""Chooses a plan, from the measured time of the current one and predicted times of all: integers in, integers out.

The choice is the same on all ranks, since the input is. Plans are only numbers here; 0 is the exact one.
"""
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

GAIN_PERCENT = 15
FIRST_PERCENT = 5           # for the first choice
WINDOWS = 2
STAYS_STEPS = 200
_ONE = 1000                 # ratios are in permille
_LEAST, _MOST = _ONE // 4, _ONE * 4


class Verdict(NamedTuple):
    """plan: the plan to use from now on. why: "" (no change), "gain", "confirmed", "disappointed", "losses".

    predicted: us of a step by that plan, corrected by measurements of it.
    """

    plan: int
    why: str
    predicted: int


@dataclass
class Hysteresis:
    """The state between windows.

    Attributes:
        kinds: by plan; plans of one kind are expected to differ alike from their predictions.
        plan: in use since step `since`; 0: from the beginning.
        ratios: by plan, the last measured over predicted time, in permille; 0: not measured.
        barred: by plan, whether it loses too much.
        candidate: the best plan in the last `windows` windows. before: the previous plan while the current one is on
            trial, for `windows` windows so far; before_us: a step's time with it.
        promised, best_us: the predicted time of the candidate, or of the plan on trial, and the time of a step: the
            least of its windows, since one slow window makes no gain.
    """

    kinds: Sequence[int]
    plan: int = 0
    since: int = 0
    ratios: list[int] = field(default_factory=list)
    barred: list[bool] = field(default_factory=list)
    candidate: int | None = None
    before: int | None = None
    before_us: int = 0
    windows: int = 0
    promised: int = 0
    best_us: int = 0

    def __post_init__(self) -> None:
        self.ratios = self.ratios or [0] * len(self.kinds)
        self.barred = self.barred or [False] * len(self.kinds)

    def corrected(self, plan: int, predicted: Sequence[int]) -> int:
        """us of a step. A plan without measurements is assumed to exceed its prediction by as much as measured ones."""
        ratio = self.ratios[plan] or max([_ONE, self.ratios[self.plan]] + [
            ratio for kind, ratio in zip(self.kinds, self.ratios, strict=True) if kind == self.kinds[plan]])
        return max(1, predicted[plan] * ratio // _ONE)

    def decide(self, step: int, measured: int, predicted: Sequence[int], usable: Sequence[bool],
               lossy: bool = False, refused: Collection[int] = ()) -> Verdict:
        """Decides at the end of a window.

        Args:
            step: the number of steps made. measured: us of a step in the window. predicted: us of a step by every plan.
            usable: by plan, whether it may be used. lossy: the current plan's codes lose more than its class allows.
            refused: plans with the candidate's codec whose codes would lose too much.
        """
        for plan in refused:
            self.barred[plan] = True
        if self.candidate in refused:
            self.candidate = None
        ratio = measured * _ONE // max(1, predicted[self.plan])
        self.ratios[self.plan] = max(_LEAST, min(_MOST, ratio))
        if lossy and self.plan:
            self.barred[self.plan] = True
            return self._take(0, "losses", step, self.corrected(0, predicted))
        if self.before is not None:
            return self._try(self.before, step, measured, predicted)
        plan = min((each for each in range(len(predicted)) if usable[each] and not self.barred[each]),
                   key=lambda each: (self.corrected(each, predicted), each), default=self.plan)
        expected = self.corrected(plan, predicted)
        stays = self.since and step - self.since < STAYS_STEPS
        least = GAIN_PERCENT if self.since else FIRST_PERCENT
        if plan == self.plan or stays or (measured - expected) * 100 < least * measured:
            self.candidate = None
            return Verdict(self.plan, "", measured)
        if plan != self.candidate:
            self.candidate, self.windows, self.promised = plan, 0, expected
        self.promised = min(self.promised, expected)
        if not self._count(measured):
            return Verdict(self.plan, "", measured)
        self.before_us = self.best_us
        return self._take(plan, "gain", step, self.promised, before=self.plan)

    def _count(self, measured: int) -> bool:
        """Counts a window of the candidate, or of the plan on trial. Returns whether it was the last one."""
        self.best_us = min(measured, self.best_us) if self.windows else measured
        self.windows += 1
        return self.windows >= WINDOWS

    def _try(self, before: int, step: int, measured: int, predicted: Sequence[int]) -> Verdict:
        if not self._count(measured):
            return Verdict(self.plan, "", measured)
        self.before = None
        if 2 * (self.before_us - self.best_us) >= self.before_us - self.promised:
            return Verdict(self.plan, "confirmed", self.best_us)
        self.ratios[self.plan] = max(self.ratios[self.plan], _ONE)
        return self._take(before, "disappointed", step, self.corrected(before, predicted))

    def _take(self, plan: int, why: str, step: int, expected: int, before: int | None = None) -> Verdict:
        self.plan, self.since, self.before, self.candidate, self.windows = plan, step, before, None, 0
        return Verdict(plan, why, expected)
