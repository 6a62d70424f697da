"""The Work that a c10d operation returns: callers wait for it, poll it, or take a future.

A caller that waits does so in the core, on its own thread, which makes the progress. Only futures need the threads of
core/operations.py.

On a GPU these threads use a stream of their own: the default one is mostly that of the computation, which must wait
for results only where they are used. A stream that needs them waits for an event, not for a thread.
"""
import functools
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import nullcontext
from typing import Any

import torch
from torch._C._distributed_c10d import Work as _Work
from torch.futures import Future, collect_all

from bagua_hvd.core.operations import Posted


@functools.cache
def _own_stream(device):
    return torch.cuda.Stream(device)


class _OnGpu:
    """The GPU streams of one Work. Make it on the stream from which the operation was posted."""

    _unread: list[tuple[Any, Any]] = []     # (event, memory that a foreign stream uses until then)

    def __init__(self, device):
        self.device = device
        self._stream = torch.cuda.current_stream(device)
        self._begun = self._stream.record_event()
        self._done = None

    def aside(self):
        """Context manager: makes a stream current on which nothing computes."""
        return torch.cuda.stream(_own_stream(self.device))

    def end(self, wait, finish, memory):
        """Ends the Work on the current stream. memory: the tensors that finish() writes."""
        stream = torch.cuda.current_stream(self.device)
        if stream != self._stream:
            stream.wait_event(self._begun)
        wait()
        if finish is not None:
            finish()
        self._done = stream.record_event()
        _OnGpu._unread = [entry for entry in _OnGpu._unread if not entry[0].query()]
        if stream != self._stream:
            _OnGpu._unread.append((self._done, (finish, memory)))

    def join(self):
        """Makes the current stream wait for the results."""
        torch.cuda.current_stream(self.device).wait_event(self._done)


class Waiter:
    """Waits in a thread for operations that have only wait(), in posting order, which is equal on all ranks."""

    def __init__(self) -> None:
        self._executor = futures.ThreadPoolExecutor(1, thread_name_prefix="bagua_hvd waiter")

    def __call__(self, operation, tensor):
        """The operation on a tensor, or a substitute with the methods that a Work needs."""
        if isinstance(operation, Posted):
            return operation
        gpu = None if tensor.is_cpu else _OnGpu(tensor.device)
        return Awaited(self._executor.submit(self._wait, operation, gpu), gpu)

    @staticmethod
    def _wait(operation, gpu):
        if gpu is None:
            operation.wait()
        else:
            with gpu.aside():
                gpu.end(operation.wait, None, operation)


def ended_within(future: futures.Future, seconds: float) -> bool:
    """Waits at most `seconds` for the end of a future; returns whether it has ended."""
    return bool(futures.wait([future], min(seconds, threading.TIMEOUT_MAX)).done)


class Awaited:
    """A future as the operation of a Work. gpu: None, or the _OnGpu that its results are joined from."""

    def __init__(self, future: futures.Future, gpu: Any = None) -> None:
        self._future = future
        self._gpu = gpu
        self.done = future.done

    def wait(self) -> Any:
        result = self._future.result()
        if self._gpu is not None:
            self._gpu.join()
        return result

    def ended_within(self, seconds: float) -> bool:
        return ended_within(self._future, seconds)

    def when_ended(self, callback: Callable[[], object]) -> None:
        # Not on the thread that ends it: the callback may wait for a later operation.
        self._future.add_done_callback(lambda _: threading.Thread(target=callback, daemon=True).start())


class Work(_Work):
    """One operation of a group, in flight or ended.

    Args:
        operation: an Operation, or an object with its ended_within(), wait(), done() and when_ended().
        outputs: tensors that hold the results when it has ended.
        what: its name in messages.
        timeout: default timeout of wait(), in seconds.
        finish: called once after success, before callers are notified: the remaining work in memory.
        source: rank in the group that sent a message; or a function without arguments that returns it at the end.
    """

    def __init__(self, operation: Any, outputs: Any, what: str, timeout: Any, finish: Any = None,
                 source: Any = -1) -> None:
        super().__init__()
        self._operation = operation
        self._outputs = outputs
        self._what = what
        self._timeout = timeout
        self._finish = finish
        self._source = source
        self._lock = threading.Lock()
        self._ended = False
        self._error: Exception | None = None
        self._future: Future | None = None
        device = next((t.device for t in outputs if not t.is_cpu), None)
        self._gpu = None if device is None else _OnGpu(device)

    def then(self, finish: Any, outputs: Any) -> Any:
        """Adds to the work at the end, and replaces the outputs, before the Work is handed out. Returns itself."""
        first = self._finish
        if first is None or finish is None:
            self._finish = first or finish
        else:
            self._finish = lambda: (first(), finish())
        self._outputs = outputs
        return self

    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the operation has ended; raises its error.

        On a GPU: returns when the results are queued ahead of later work on the current stream.

        Raises:
            RuntimeError: "Timed out ...": the operation continues. HorovodInternalError, which is a RuntimeError, too:
            ranks disagreed, or one was lost.
        """
        if not self._ended:
            seconds = timeout.total_seconds() if timeout else 0
            seconds = seconds if seconds > 0 else self._timeout
            if not self.ended_within(seconds):
                raise RuntimeError(f"{self._what}: Timed out waiting {seconds:g} s for the other ranks; the operation "
                                   "continues; do not use its tensors. Check that all ranks of the group called it.")
            self._end()
        if self._error is not None:
            raise self._error
        if self._gpu is not None:
            self._gpu.join()
        return True

    def ended_within(self, seconds: float) -> Any:
        """Waits at most `seconds` for the end of its operation; returns whether it has ended."""
        operation = self._operation     # the thread that ends the Work clears it
        return operation is None or operation.ended_within(seconds)

    def _end(self):
        """Called after the operation has ended: does the remaining work, once."""
        with self._lock:
            if self._ended:
                return
            try:
                if self._gpu is not None:
                    self._gpu.end(self._operation.wait, self._finish, self._outputs)
                else:
                    self._operation.wait()
                    if self._finish is not None:
                        self._finish()
            except Exception as error:
                self._error = error
            self._finish = None
            self._ended = True
            self._operation = None

    def is_completed(self) -> Any:
        operation = self._operation
        if not self._ended and operation.done():
            self._end()
        return self._ended

    def is_success(self) -> Any:
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        return self._error if self.is_completed() else None

    def result(self) -> Any:
        """The tensors with the results."""
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> Any:
        """Rank in the group that the message of a recv came from."""
        return self._source() if callable(self._source) else self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future of the list of tensors, completed by another thread: nobody needs to wait for the Work."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = Future(devices=[self._gpu.device] if self._gpu is not None else None)
            operation = None if self._ended else self._operation
        if operation is None:
            self._complete(future)
        else:
            operation.when_ended(lambda: self._ended_unattended(future))    # may run at once, and takes the lock
        return future

    def _ended_unattended(self, future):
        with nullcontext() if self._gpu is None else self._gpu.aside():     # the future adopts this stream
            self._end()
            self._complete(future)

    def _complete(self, future):
        if self._error is not None:
            future.set_exception(self._error)
            return
        if self._gpu is not None:
            self._gpu.join()
        future.set_result(self._outputs)


class CombinedWork:
    """Several Works as the operation of one Work."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def ended_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        return all(work.ended_within(max(deadline - time.monotonic(), 0)) for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def when_ended(self, callback: Callable[[], object]) -> None:
        collect_all([work.get_future() for work in self._works]).add_done_callback(lambda _: callback())
