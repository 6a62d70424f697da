"""Calls functions when operations have ended, on a thread of its own.

For who must not wait: futures, chains of operations. The thread sleeps in the core and is told of each operation that
ends, in whatever order. Whoever can wait should: a caller that waits for one operation makes the progress itself.
"""
import itertools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from bagua_hvd.core.native import ERR_ARGUMENT, NULL, OK, lib


class _Completions:
    """The list of the core, and the thread that takes from it. Lives as long as the process."""

    def __init__(self) -> None:
        self._list = lib.bhvd_completions_create()
        if self._list == NULL:
            raise MemoryError("no memory for a list of ended operations")
        self._callbacks: dict[int, Callable[[], object]] = {}       # by number
        self._numbers = itertools.count()
        threading.Thread(target=self._run, name="bagua_hvd completions", daemon=True).start()

    def add(self, handle: Any, callback: Callable[[], object]) -> None:
        number = next(self._numbers)
        self._callbacks[number] = callback
        status = lib.bhvd_completions_add(self._list, handle, number)
        if status != OK:
            del self._callbacks[number]
            if status == ERR_ARGUMENT:
                raise ValueError("somebody else is told already when this operation ends")
            raise MemoryError("no memory to be told when an operation ends")

    def _run(self) -> None:
        while True:
            callback = self._callbacks.pop(lib.bhvd_completions_next(self._list, -1))
            try:
                callback()
            except BaseException as error:  # of one callback: the others are to be called, too
                sys.unraisablehook(_Unraisable(error, callback))    # type: ignore[arg-type]
            del callback


class _Unraisable:
    def __init__(self, error: BaseException, callback: Callable[[], object]) -> None:
        self.exc_type, self.exc_value, self.exc_traceback = type(error), error, error.__traceback__
        self.err_msg, self.object = "Exception ignored when an operation ended", callback


_lock = threading.Lock()
_completions: _Completions | None = None


def when_ended(handle: Any, callback: Callable[[], object]) -> None:
    """Calls callback() once the operation of a native handle has ended, well or not; soon, if it has already.

    On the thread of all callbacks: it must not block. One callback for a handle; the handle may be dropped before.
    """
    global _completions
    with _lock:
        if _completions is None:
            _completions = _Completions()
    _completions.add(handle, callback)


def _after_fork_in_child() -> None:
    global _completions, _lock
    _completions, _lock = None, threading.Lock()    # the thread did not come along


os.register_at_fork(after_in_child=_after_fork_in_child)
