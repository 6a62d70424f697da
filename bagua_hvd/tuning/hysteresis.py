"""Chooses a plan, from the measured time of the current one and predicted times of all: integers in, integers out.

The choice is the same on all ranks, since the input is. Plans are only numbers here; 0 is the exact one.
"""
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

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
        plan: in use since step `since`. candidate: the best plan in the last `windows` windows, -1: none.
        before: the previous plan while the current one is on trial, else -1; before_us: a step's time with it;
            promised: the predicted time of this one. tried: windows of the trial so far, best_us: the shortest step in
            them. For a candidate, promised and best_us are the least of its windows: one slow window makes no gain.
        kinds: by plan; plans of one kind are expected to differ alike from their predictions.
        ratios: by plan, the last measured over predicted time, in permille. barred: plans that lose too much.
    """

    plan: int = 0
    since: int | None = None
    candidate: int = -1
    windows: int = 0
    before: int = -1
    before_us: int = 0
    promised: int = 0
    tried: int = 0
    best_us: int = 0
    kinds: tuple[int, ...] = ()
    ratios: dict[int, int] = field(default_factory=dict)
    barred: set[int] = field(default_factory=set)

    def corrected(self, plan: int, predicted: Sequence[int]) -> int:
        """us of a step. A plan without measurements is assumed to exceed its prediction by as much as measured ones."""
        ratio = self.ratios.get(plan)
        if ratio is None:
            ratio = max([_ONE, self.ratios.get(self.plan, _ONE)] + [
                known for seen, known in self.ratios.items() if self._kind(seen) == self._kind(plan)])
        return max(1, predicted[plan] * ratio // _ONE)

    def _kind(self, plan: int) -> int:
        return self.kinds[plan] if plan < len(self.kinds) else plan

    def decide(self, step: int, measured: int, predicted: Sequence[int], usable: Sequence[bool],
               lossy: bool = False, refused: Collection[int] = ()) -> Verdict:
        """Decides at the end of a window.

        Args:
            step: the number of steps made. measured: us of a step in the window. predicted: us of a step by every plan.
            usable: by plan, whether it may be used. lossy: the current plan's codes lose more than its class allows.
            refused: the candidate and other plans with its codec, if its codes would lose too much.
        """
        if refused:
            self.barred.update(refused)
            self.candidate, self.windows = -1, 0
        ratio = measured * _ONE // max(1, predicted[self.plan])
        self.ratios[self.plan] = max(_LEAST, min(_MOST, ratio))
        if lossy and self.plan:
            self.barred.add(self.plan)
            return self._take(0, "losses", step, measured, self.corrected(0, predicted), trial=False)
        if self.before >= 0:
            return self._try(step, measured, predicted)
        plan = min((each for each in range(len(predicted)) if usable[each] and each not in self.barred),
                   key=lambda each: (self.corrected(each, predicted), each), default=self.plan)
        expected = self.corrected(plan, predicted)
        stays = self.since is not None and step - self.since < STAYS_STEPS
        least = FIRST_PERCENT if self.since is None else GAIN_PERCENT
        if plan == self.plan or stays or (measured - expected) * 100 < least * measured:
            self.candidate, self.windows = -1, 0
            return Verdict(self.plan, "", measured)
        again = plan == self.candidate
        self.windows = self.windows + 1 if again else 1
        self.best_us = min(measured, self.best_us) if again else measured
        self.promised = min(expected, self.promised) if again else expected
        self.candidate = plan
        if self.windows < WINDOWS:
            return Verdict(self.plan, "", measured)
        return self._take(plan, "gain", step, self.best_us, self.promised, trial=True)

    def _try(self, step: int, measured: int, predicted: Sequence[int]) -> Verdict:
        self.best_us = min(measured, self.best_us) if self.tried else measured
        self.tried += 1
        if self.tried < WINDOWS:
            return Verdict(self.plan, "", measured)
        measured, back = self.best_us, self.before
        self.before = -1
        if 2 * (self.before_us - measured) >= self.before_us - self.promised:
            return Verdict(self.plan, "confirmed", measured)
        self.ratios[self.plan] = min(_MOST, max(self.ratios[self.plan], _ONE))
        return self._take(back, "disappointed", step, measured, self.corrected(back, predicted), trial=False)

    def _take(self, plan: int, why: str, step: int, measured: int, expected: int, trial: bool) -> Verdict:
        self.before = self.plan if trial else -1
        self.before_us, self.promised, self.tried = measured, expected, 0
        self.plan, self.since, self.candidate, self.windows = plan, step, -1, 0
        return Verdict(plan, why, expected)

    def as_dict(self) -> dict[str, Any]:
        """The state as a dict, for checkpoints and comparisons."""
        return {**asdict(self), "ratios": sorted(self.ratios.items()), "barred": sorted(self.barred)}

    @classmethod
    def of_dict(cls, kept: dict[str, Any]) -> "Hysteresis":
        """The inverse of as_dict()."""
        known = {each.name for each in fields(cls)}
        values = {name: value for name, value in kept.items() if name in known}
        values["ratios"] = {int(plan): int(ratio) for plan, ratio in values.get("ratios", ())}
        values["barred"] = set(values.get("barred", ()))
        values["kinds"] = tuple(values.get("kinds", ()))
        return cls(**values)
