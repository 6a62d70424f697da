"""Sums in flight from one step to a later one, alike on all ranks: state that a checkpoint waits for."""
from contextlib import suppress
from typing import Any

import numpy as np

from bagua_hvd.core.operations import Posted
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import runtime
from bagua_hvd.primitives import c_fp_s


class SumInFlight:
    """A sum over the ranks, in flight or complete, and the number of ranks in it. Checkpoints wait for it.

    Ranks may be some steps apart, so shutdown() and join() also wait: others may need this rank's part.
    """

    def __init__(self, count: int, dtype: np.dtype) -> None:
        self.count = count
        self._dtype = dtype
        self._delta: np.ndarray | None = None
        self._ranks: np.ndarray = np.ones(1, np.float32)
        self._operations: list[Posted] = []
        self._inits = 0                     # runtime.inits when it was sent

    def begin(self, delta: np.ndarray, operation: Posted, group: ProcessSet, name: str) -> None:
        """delta: this rank's values, which `operation` replaces by the sum."""
        self._delta, self._inits = delta, runtime.inits
        self._ranks[0] = 1
        self._operations = [operation, c_fp_s(self._ranks, group, average=False, name=f"{name}.ranks")]
        runtime.track(self)

    def finished(self) -> bool:
        """Whether wait_all() would return at once."""
        return all(operation.done() for operation in self._operations)

    def wait_all(self) -> None:
        """Blocks until it is complete. Failures are raised to callers that use the result."""
        for operation in self._operations:
            with suppress(Exception):
                operation.wait()
        runtime.in_flight.discard(self)

    def _here(self) -> np.ndarray | None:
        """The sum; None: nothing was sent, or the connections were lost, and the sum with them, on all ranks."""
        self.wait_all()
        if self._operations and self._inits != runtime.inits:
            self._delta, self._operations = None, []
        for operation in self._operations:
            operation.wait()
        return self._delta

    def take(self) -> np.ndarray | None:
        """Returns the mean and forgets it; None if there is none.

        Raises:
            HorovodInternalError: a rank was lost.
        """
        total = self._here()
        self._delta, self._operations = None, []
        return None if total is None else total / self._ranks[0]

    def state_dict(self) -> dict[str, Any]:
        total = self._here()
        return {} if total is None else {"data": total.tobytes(), "ranks": float(self._ranks[0])}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Returns False, and changes nothing, when the state is of another size."""
        if state:
            if len(state["data"]) != self.count * self._dtype.itemsize:
                return False
            self._delta = np.frombuffer(state["data"], self._dtype).copy()
            self._ranks[0] = state["ranks"]
        return True
