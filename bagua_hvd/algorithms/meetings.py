"""Rounds of pairs that go on by themselves: who waits for a late peer goes on to meet others.

A cycle of rounds pairs a rank with one peer after the other (decentralized.py). A rank begins them in this order, and
leaves out those whose last meeting is still on its way. So each pair matches by the number of its own meetings
(native/core/negotiation/pairwise.h): a late rank delays the rounds of its own pairs, and no others.

Who may wait for a meeting, since it must not be older than max_staleness, leaves out none: of those who wait so, each
waits for one that is behind it in the one order of all. The others begin any round that is free: there is no deadlock.
"""
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import numpy as np

from bagua_hvd.algorithms.exchange import Exchange
from bagua_hvd.algorithms.rounds import AnyRounds, Patience
from bagua_hvd.primitives import c_fp_s, d_fp_s
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model

LATE = 2.0          # times what the last meeting took
POLL_SECONDS = 0.002
STOPPING_SECONDS = 0.05      # between two rounds of a rank that waits for all to stop


@dataclass
class Meeting:
    """One on its way: its parts, bucket by bucket; since when, in seconds and steps; and whose memory it has."""

    parts: list[Exchange]
    since: float
    step: int
    place: int

    def done(self) -> bool:
        return all([part.done() for part in self.parts])


class Meetings(AnyRounds):
    """The meetings of one model, from one init() on.

    Args:
        begin: one bucket's part, of a round of the cycle; the last argument numbers memory that no other meeting has.
        topology, cycle: of d_fp_s, and how many rounds it has.
        in_order: False: each cycle in an order by chance, the same on all ranks.
        interval_s: from the end of one to the beginning of the next. max_staleness: see Async.
    """

    def __init__(self, model: Model, begin: Callable[[Bucket, int, int], Exchange], topology: str, cycle: int,
                 in_order: bool, interval_s: float, max_staleness: int | None) -> None:
        self._model, self._begin_part = model, begin
        self._topology, self._cycle, self._in_order = topology, cycle, in_order
        self._interval_s, self._max_staleness = interval_s, max_staleness
        self._order = self._rounds()
        self._begun = np.zeros(cycle)
        self._on_their_way: dict[int, Meeting] = {}
        self._patience = Patience()
        self._last_took = 0.0
        self._changed_at = time.monotonic()

    def _rounds(self) -> Iterator[int]:
        for number in itertools.count():
            yield from range(self._cycle) if self._in_order else Random(number).sample(range(self._cycle), self._cycle)

    def _begin(self, round: int) -> None:
        taken = {meeting.place for meeting in self._on_their_way.values()}
        place = next(place for place in itertools.count() if place not in taken)
        parts = [self._begin_part(bucket, round, place) for bucket in self._model.weights]
        self._changed_at = time.monotonic()
        self._on_their_way[round] = Meeting(parts, self._changed_at, self._model.step, place)
        self._begun[round] += 1

    def _end(self, round: int) -> None:
        meeting = self._on_their_way.pop(round)
        for bucket, part in zip(self._model.weights, meeting.parts, strict=True):
            bucket.add(part.wait())
        self._changed_at = time.monotonic()
        self._last_took = self._changed_at - meeting.since

    def advance(self) -> None:
        """After a step: ends what is done or too old, and begins another when it is due."""
        self._end_done(self._max_staleness)
        if self.running and not (self._on_their_way and self._max_staleness is not None):
            self._begin_due(self._interval_s)

    def _end_done(self, max_staleness: int | None) -> None:
        if max_staleness is None:
            self._wait_for_punctual()
        for round, meeting in list(self._on_their_way.items()):
            if meeting.done() or (max_staleness is not None and self._model.step - meeting.step >= max_staleness):
                self._end(round)

    def _wait_for_punctual(self) -> None:
        """With patience; but not for what is later than the others usually are."""
        punctual = [meeting for meeting in self._on_their_way.values() if not self._is_late(meeting, 0)]
        self._patience.wait_for(lambda: any([meeting.done() for meeting in punctual]),
                                max((self._model.step - meeting.step for meeting in punctual), default=0))

    def _is_late(self, meeting: Meeting, interval_s: float) -> bool:
        return time.monotonic() - meeting.since >= max(interval_s, LATE * self._last_took)

    def _begin_due(self, interval_s: float) -> None:
        is_due = time.monotonic() - self._changed_at >= interval_s and len(self._on_their_way) < self._cycle
        if is_due and all(self._is_late(meeting, interval_s) for meeting in self._on_their_way.values()):
            self._begin(next(round for round in self._order if round not in self._on_their_way))

    def stop(self) -> None:
        """Meets others until all ranks are here, and then those that wait for this one. Collective."""
        self.running = False
        if self.stopped:
            return
        group, name = self._model.group, self._model.name
        all_are_here = c_fp_s(np.ones(1, np.float32), group, name=f"{name}.stopping")
        while not all_are_here.done():
            self._end_done(None)
            self._begin_due(min(self._interval_s, STOPPING_SECONDS))
            time.sleep(POLL_SECONDS)
        all_are_here.wait()
        # From here on nobody begins by himself, but for those who wait.
        for round, times in enumerate(self._wanted()):
            while self._begun[round] < times:
                if round in self._on_their_way:
                    self._end(round)
                self._begin(round)
        for round in list(self._on_their_way):
            self._end(round)
        self.stopped = True
        self._order = self._rounds()            # they were not begun in the one order of all
        self._begun[:] = 0

    def _wanted(self) -> np.ndarray:
        """How often each round must have begun here, that no other rank waits for it.

        As often as the peer's. But all ranks agree on a first and a second time of every name, and on each time of what
        does not stand (native/core/negotiation/pairwise.h): then none is ahead of any by more than one.
        """
        group, name = self._model.group, f"{self._model.name}.begun"
        everyones: np.ndarray = np.zeros((group.size(), self._cycle), np.float32)
        everyones[group.rank()] = self._begun
        posted = [c_fp_s(everyones.reshape(-1), group, average=False, name=name)]
        means = self._begun.reshape(-1, 1).copy()
        for round, mean in enumerate(means):
            posted.append(d_fp_s(mean, group, self._topology, round, name=f"{name}.{round}"))
        for operation in posted:
            operation.wait()
        most = everyones.max(0)
        by_all = np.where(most - everyones.min(0) <= 1, most, np.minimum(most, 2))
        wanted: np.ndarray = np.maximum(2 * means[:, 0] - self._begun, by_all)
        return wanted
