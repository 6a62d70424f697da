"""One window of gradients: which of them are ready, placed in buckets and posted, and the operations in flight.

A Window lives from one synchronize() of its Reducer to the next. With delay=1 it lives on as Late: its operations are
waited for one window later, and those with several phases go on in a thread of their own meanwhile.
"""
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from bagua_hvd.core.operations import account
from bagua_hvd.job.runtime import runtime
from bagua_hvd.training.buckets import Bucket


class Window:
    """See the module.

    Args:
        count: of gradients. buckets: those that are to be posted. passes: backward passes that make the window.
    Attributes:
        ready, placed: by gradient; ready: the last backward pass of the window has accumulated it.
        unposted: buckets. operations: by a number that is the same on all ranks.
        travels: whether gradients do; None: the algorithm has not been asked yet.
        failure: what went wrong while the rest was posted. sent: with delay=1, nothing is left to be posted.
        passes_left: backward passes until it ends. overflow_known: the ranks have agreed on one.
    """

    def __init__(self, count: int, buckets: Iterable[Bucket], passes: int) -> None:
        self.ready = [False] * count
        self.placed = [False] * count
        self.unposted = list(buckets)
        self.operations: dict[int, Any] = {}
        self.travels: bool | None = None
        self.failure: Exception | None = None
        self.sent = False
        self.passes_left = passes
        self.overflow_known = False
        self.advancing: list[Any] = []      # operations of several phases, see algorithms/exchange.py

    def post(self, number: int, operation: Any) -> None:
        """Takes in an operation that has just been posted, and lets those of several phases go on."""
        self.operations[number] = operation
        for earlier in self.advancing:
            earlier.advance()
        if hasattr(operation, "advance"):
            self.advancing.append(operation)

    def wait(self, explained: Callable[[Exception, int], Exception]) -> Exception | None:
        """Waits for all operations. Returns the first failure, or None.

        explained: function of a failure and its operation's number: what is said of it.
        """
        failure = None
        # In the same order everywhere: an operation's wait() may post another one, and wait for that.
        for number, operation in sorted(self.operations.items()):
            try:
                operation.wait()
            except Exception as error:
                # The others are waited for first: their memory is in the core's hands.
                failure = failure or explained(error, number)
            for each in self.advancing:
                each.advance()
        return failure


class Late:
    """A Window with delay=1, of which all is posted. Who needs the results hears of failures.

    Args:
        number: of the account on which what follows its operations counts.
    """

    def __init__(self, window: Window, number: int) -> None:
        self.inits = runtime.inits
        self._window = window
        self._account = number
        self._thread = threading.Thread(target=self._end, args=(window.advancing,), daemon=True)
        if window.advancing:
            self._thread.start()
        runtime.travel(self)

    def _end(self, operations: Iterable[Any]) -> None:
        token = account.set(self._account)
        try:
            for operation in operations:
                with suppress(Exception):
                    operation.wait()
        finally:
            account.reset(token)

    def arrived(self) -> bool:
        """Whether arrive() would return at once. An algorithm's own operations need not tell."""
        return not self._thread.is_alive() and all(
            getattr(operation, "done", lambda: False)() for operation in self._window.operations.values())

    def arrive(self) -> None:
        """Blocks until all operations have ended, well or not."""
        if self._window.advancing:
            self._thread.join()
        self._end([operation for _, operation in sorted(self._window.operations.items())])
        runtime.travelling.discard(self)

    def wait(self, explained: Callable[[Exception, int], Exception]) -> Exception | None:
        """After arrive(): the first failure; see Window.wait()."""
        return self._window.wait(explained)
