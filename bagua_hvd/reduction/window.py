"""One window of gradients: which of them are ready, placed in buckets and posted, and the operations in flight.

A Window lives from one synchronize() of its Reducer to the next. With delay=1 it continues as DelayedWindow: its
operations are waited for one window later, and a separate thread advances the multi-phase ones meanwhile.
"""
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from bagua_hvd.core.operations import byte_counter
from bagua_hvd.job.runtime import runtime


class Window:
    """See the module.

    Args:
        count: number of gradients. passes: backward passes in the window.
    Attributes:
        ready, placed: by gradient; ready: the last backward pass of the window has accumulated it.
        operations: by a number that is the same on all ranks: of a bucket its index.
        communicates: whether gradients are communicated; None: the algorithm has not been asked yet.
        failure: the error when the rest was posted. sent: whether everything is posted.
        passes_left: backward passes until it ends. overflow_known: whether the ranks have agreed on overflow.
    """

    def __init__(self, count: int, passes: int) -> None:
        self.ready = [False] * count
        self.placed = [False] * count
        self.operations: dict[int, Any] = {}
        self.communicates: bool | None = None
        self.failure: Exception | None = None
        self.sent = False
        self.passes_left = passes
        self.overflow_known = False
        self.advancing: list[Any] = []      # multi-phase operations, see algorithms/exchange.py

    def post(self, number: int, operation: Any) -> None:
        """Adds an operation that has just been posted, and advances the multi-phase ones."""
        self.operations[number] = operation
        for earlier in self.advancing:
            earlier.advance()
        if hasattr(operation, "advance"):
            self.advancing.append(operation)


class DelayedWindow:
    """A Window with delay=1, completely posted. After wait_all(), waiting again reports the failures.

    Args:
        number: of the counter for operations that follow the posted ones.
    """

    def __init__(self, window: Window, number: int) -> None:
        self.inits = runtime.inits
        self.window = window
        self._byte_counter = number
        self._thread = threading.Thread(target=self._end, args=(window.advancing,), daemon=True)
        if window.advancing:
            self._thread.start()
        runtime.track(self)

    def _end(self, operations: Iterable[Any]) -> None:
        token = byte_counter.set(self._byte_counter)
        try:
            for operation in operations:
                with suppress(Exception):
                    operation.wait()
        finally:
            byte_counter.reset(token)

    def finished(self) -> bool:
        """Whether wait_all() would not block. False for an algorithm's own operations without done()."""
        return not self._thread.is_alive() and all(
            getattr(operation, "done", lambda: False)() for operation in self.window.operations.values())

    def wait_all(self) -> None:
        """Blocks until all operations have ended, successfully or not."""
        if self.window.advancing:
            self._thread.join()
        self._end([operation for _, operation in sorted(self.window.operations.items())])
        runtime.in_flight.discard(self)
