"""Pairwise rounds, each pair at its own pace: a rank with a late peer continues with other peers.

A cycle of rounds pairs a rank with one peer after the other (decentralized.py). A rank begins rounds in this order, and
skips a round whose previous turn is still in flight. Each pair matches its rounds by their number
(native/core/negotiation/pairwise.h), so a late rank delays the rounds of its own pairs only.

A rank that may block on a round, because of max_staleness, skips none. Each blocked rank waits for one that is behind
it in the common order, and the others begin any free round, so there is no deadlock.
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

LATE = 2.0          # times the duration of the last round
POLL_SECONDS = 0.002
STOPPING_SECONDS = 0.05      # between two rounds of a rank that waits for all to stop


@dataclass
class PairRound:
    """A pairwise round in flight: its parts by bucket, its start (seconds, step), and the number of its buffers."""

    parts: list[Exchange]
    since: float
    step: int
    place: int

    def done(self) -> bool:
        return all([part.done() for part in self.parts])


class PairRounds(AnyRounds):
    """The pairwise rounds of one model, within one init().

    Args:
        begin: starts one bucket's part of a round of the cycle; the last argument numbers its own buffers.
        topology, cycle: the topology of d_fp_s, and its number of rounds.
        in_order: False: each cycle in a random order, the same on all ranks.
        interval_s: seconds from the end of a round to the start of the next. max_staleness: see Async.
    """

    def __init__(self, model: Model, begin: Callable[[Bucket, int, int], Exchange], topology: str, cycle: int,
                 in_order: bool, interval_s: float, max_staleness: int | None) -> None:
        self._model, self._begin_part = model, begin
        self._topology, self._cycle, self._in_order = topology, cycle, in_order
        self._interval_s, self._max_staleness = interval_s, max_staleness
        self._order = self._rounds()
        self._begun = np.zeros(cycle)
        self._in_flight: dict[int, PairRound] = {}
        self._patience = Patience()
        self._last_took = 0.0
        self._changed_at = time.monotonic()

    def _rounds(self) -> Iterator[int]:
        for number in itertools.count():
            yield from range(self._cycle) if self._in_order else Random(number).sample(range(self._cycle), self._cycle)

    def _begin(self, round: int) -> None:
        taken = {pair_round.place for pair_round in self._in_flight.values()}
        place = next(place for place in itertools.count() if place not in taken)
        parts = [self._begin_part(bucket, round, place) for bucket in self._model.weights]
        self._changed_at = time.monotonic()
        self._in_flight[round] = PairRound(parts, self._changed_at, self._model.step, place)
        self._begun[round] += 1

    def _end(self, round: int) -> None:
        pair_round = self._in_flight.pop(round)
        for bucket, part in zip(self._model.weights, pair_round.parts, strict=True):
            bucket.add(part.wait())
        self._changed_at = time.monotonic()
        self._last_took = self._changed_at - pair_round.since

    def advance(self) -> None:
        """After a step: ends rounds that are done or too old, and begins one that is due."""
        self._end_done(self._max_staleness)
        if self.running and not (self._in_flight and self._max_staleness is not None):
            self._begin_due(self._interval_s)

    def _end_done(self, max_staleness: int | None) -> None:
        if max_staleness is None:
            self._wait_for_punctual()
        for round, pair_round in list(self._in_flight.items()):
            if pair_round.done() or (max_staleness is not None and self._model.step - pair_round.step >= max_staleness):
                self._end(round)

    def _wait_for_punctual(self) -> None:
        """Waits as Patience says, but not for rounds that take much longer than the last one."""
        punctual = [pair_round for pair_round in self._in_flight.values() if not self._is_late(pair_round, 0)]
        self._patience.wait_for(lambda: any([pair_round.done() for pair_round in punctual]),
                                max((self._model.step - pair_round.step for pair_round in punctual), default=0))

    def _is_late(self, pair_round: PairRound, interval_s: float) -> bool:
        return time.monotonic() - pair_round.since >= max(interval_s, LATE * self._last_took)

    def _begin_due(self, interval_s: float) -> None:
        is_due = time.monotonic() - self._changed_at >= interval_s and len(self._in_flight) < self._cycle
        if is_due and all(self._is_late(pair_round, interval_s) for pair_round in self._in_flight.values()):
            self._begin(next(round for round in self._order if round not in self._in_flight))

    def stop(self) -> None:
        """Continues rounds until all ranks have called this, then ends those that peers wait for. Collective."""
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
        # From here on, a rank begins only rounds that a peer waits for.
        for round, times in enumerate(self._wanted()):
            while self._begun[round] < times:
                if round in self._in_flight:
                    self._end(round)
                self._begin(round)
        for round in list(self._in_flight):
            self._end(round)
        self.stopped = True
        self._order = self._rounds()            # the last rounds were not in the common order
        self._begun[:] = 0

    def _wanted(self) -> np.ndarray:
        """How often each round must have begun on this rank, so that no other rank waits for it.

        As often as on the peer. But all ranks negotiate the first two times of every name, and each time of an
        operation that is not pairwise (native/core/negotiation/pairwise.h). So no rank is ahead by more than one.
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
