"""What is on its way from one step to a later one, of all ranks alike: state that a checkpoint waits for."""
from contextlib import suppress
from typing import Any

import numpy as np

from bagua_hvd.core.operations import Posted
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import runtime
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.training.state import State


class Travelling:
    """A sum over the ranks, on its way or here, and of how many ranks it is. Checkpoints wait for it.

    Ranks may be some steps apart: so shutdown() and join() wait, too, for others may need this one's part.
    """

    def __init__(self, count: int, dtype: np.dtype) -> None:
        self.count = count
        self._dtype = dtype
        self._delta: np.ndarray | None = None
        self._ranks: np.ndarray = np.ones(1, np.float32)
        self._operations: list[Posted] = []
        self._inits = 0                     # in which it was sent

    def begin(self, delta: np.ndarray, operation: Posted, group: ProcessSet, name: str) -> None:
        """delta: this rank's values, which `operation` makes the sum."""
        self._delta, self._inits = delta, runtime.inits
        self._ranks[0] = 1
        self._operations = [operation, c_fp_s(self._ranks, group, average=False, name=f"{name}.ranks")]
        runtime.travel(self)

    def arrived(self) -> bool:
        """Whether arrive() would return at once."""
        return all(operation.done() for operation in self._operations)

    def arrive(self) -> None:
        """Blocks until it is here. Who needs it hears of failures."""
        for operation in self._operations:
            with suppress(Exception):
                operation.wait()
        runtime.travelling.discard(self)

    def _here(self) -> np.ndarray | None:
        """The sum; None: nothing has been sent, or it was lost with the connections, which it is on all ranks."""
        self.arrive()
        if self._operations and self._inits != runtime.inits:
            self._delta, self._operations = None, []
        for operation in self._operations:
            operation.wait()
        return self._delta

    def take(self) -> np.ndarray | None:
        """The mean, once; None: there is none.

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


def travelling(state: State, name: str, count: int, dtype: np.dtype) -> Travelling:
    """The one that is kept under a name, of `count` values."""
    def make() -> Travelling:
        for sent in list(runtime.travelling):       # what was dropped with the state may have the name still
            sent.arrive()
        return Travelling(count, dtype)

    kept: Travelling = state.keep(name, make, shared=True, fits=lambda kept: kept.count == count)
    return kept
