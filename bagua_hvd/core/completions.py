"""Calls functions when operations have ended, on threads of this module.

For futures and chains of operations, whose owners must not wait. The threads sleep in the core, which wakes one for
each operation that ends. While all threads run callbacks, one more is started; so a callback may take long, or wait
for another operation. A caller that can wait for its operation should wait: its thread then makes the progress.
"""
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

from bagua_hvd.core.native import ERR_ARGUMENT, NULL, OK, lib


class _Completions:
    """The core's list of ended operations and the threads that take from it. Lives as long as the process."""

    def __init__(self) -> None:
        self._list = lib.bhvd_completions_create()
        if self._list == NULL:
            raise MemoryError("no memory for a list of ended operations")
        self._callbacks: dict[int, Callable[[], object]] = {}       # by number
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._idle = 0              # threads that run no callback
        self._start_thread()

    def add(self, handle: Any, callback: Callable[[], object]) -> None:
        number = next(self._numbers)
        self._callbacks[number] = callback
        status = lib.bhvd_completions_add(self._list, handle, number)
        if status != OK:
            del self._callbacks[number]
            if status == ERR_ARGUMENT:
                raise ValueError("this operation already has a completion callback")
            raise MemoryError("out of memory while registering a completion callback")

    def _start_thread(self) -> None:
        self._idle += 1
        threading.Thread(target=self._run, name="bagua_hvd completions", daemon=True).start()

    def _run(self) -> None:
        while True:
            callback = self._callbacks.pop(lib.bhvd_completions_next(self._list, -1))
            with self._lock:
                self._idle -= 1
                if not self._idle:
                    self._start_thread()
            try:
                callback()
            except BaseException as error:  # one callback's error must not stop the others
                threading.excepthook(threading.ExceptHookArgs(
                    (type(error), error, error.__traceback__, threading.current_thread())))
            del callback
            with self._lock:
                if self._idle >= _IDLE_MAX:
                    return
                self._idle += 1


_IDLE_MAX = 2           # threads left over by long callbacks end
_lock = threading.Lock()
_completions: _Completions | None = None


def when_ended(handle: Any, callback: Callable[[], object]) -> None:
    """Calls callback() once the operation of a native handle has ended, with or without an error.

    If it has ended already, the call follows soon. callback() runs on a thread of this module and may block; callbacks
    run concurrently, in any order. A handle takes one callback, and may be dropped before it runs.
    """
    global _completions
    with _lock:
        if _completions is None:
            _completions = _Completions()
    _completions.add(handle, callback)


def _after_fork_in_child() -> None:
    global _completions, _lock
    _completions, _lock = None, threading.Lock()    # threads do not survive a fork


os.register_at_fork(after_in_child=_after_fork_in_child)
