"""Weighted averages: the factor of a rank's gradients before the ranks average them."""
from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np

from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_fp_s

WRONG = ("set_weight() takes a number of samples or tokens, finite and not negative, but {who} an invalid one; this "
         "rank's weight is {weight!r:.100}")
ALL_ZERO = "the weights of all ranks are 0: at least one rank must have samples"
UNSUITABLE = ("{name} does not average gradients in every step, so set_weight() has nothing to weigh: use another "
              "algorithm, or equal batches")


def check_weighable(algorithm: Algorithm | None) -> None:
    """Raises ValueError unless gradients are averaged in every step. algorithm: None for Adasum."""
    if algorithm is None or not algorithm.average:
        raise ValueError("set_weight() is for averages: use op=hvd.Average")
    if algorithm.overrides("communicates_gradients") or algorithm.models_differ or algorithm.asynchronous:
        raise ValueError(UNSUITABLE.format(name=type(algorithm).__name__))


def check_alone(weight: Any) -> None:
    """Raises ValueError if the weight of a rank without communication is wrong or 0."""
    if math.isnan(_number(weight)):
        raise ValueError(WRONG.format(who="this rank gave", weight=weight))
    if weight == 0:
        raise ValueError(ALL_ZERO)


def _number(weight: Any) -> float:
    """The weight as a number; NaN if it is wrong."""
    with suppress(TypeError, ValueError, OverflowError):
        if 0 <= (number := float(weight)) < math.inf:
            return number
    return math.nan


class Weight:
    """The weight of this rank, and the sum of all ranks' weights, in flight: the constructor posts it. Collective.

    A rank in join() adds 0.

    Args:
        weight: of this rank. A wrong one makes factor() raise on all ranks. name: of the operation. group: the ranks.
        earlier: the previous Weight of this name, possibly dropped in flight: it is waited for first.
    """

    def __init__(self, weight: Any, name: str, group: ProcessSet, earlier: Weight | None = None) -> None:
        if earlier is not None:
            with suppress(HorovodInternalError):    # of a job that has ended; a rank that is lost now is met below
                earlier.wait()
        self._given, self._weight, self._size = weight, _number(weight), group.size()
        self._sums = np.array([0, 1, group.rank()] if math.isnan(self._weight) else [self._weight, 0, 0], np.float64)
        self._operation = c_fp_s(self._sums, group, average=False, name=name)

    def wait(self) -> None:
        """Blocks until the sum is complete. HorovodInternalError: ranks disagreed, or one was lost."""
        self._operation.wait()

    def factor(self) -> float:
        """Blocks. Returns the factor of this rank's gradients: n w_i / sum of w_i, for n ranks.

        Raises:
            ValueError: a rank gave a wrong weight, or all gave 0; on all ranks.
            HorovodInternalError: see wait().
        """
        self.wait()
        total, wrong, rank = self._sums
        if wrong:
            who = f"rank {rank:.0f} gave" if wrong == 1 else f"{wrong:.0f} ranks gave"
            raise ValueError(WRONG.format(who=who, weight=self._given))
        if total == 0:
            raise ValueError(ALL_ZERO)
        return float(self._size * self._weight / total)
