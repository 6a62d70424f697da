"""One window of gradients: which of them are ready, placed in buckets and posted, and the operations in flight.

A Window lives from one synchronize() of its Reducer to the next. With delay=1 it is a DelayedWindow.
"""
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.operations import counted
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import runtime
from bagua_hvd.job.statistics import Account
from bagua_hvd.reduction.agreement import listed
from bagua_hvd.reduction.layout import Layout
from bagua_hvd.training import delayed
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Pending


class Window:
    """See the module.

    Args:
        model, layout: its gradients and their buckets. communication: by dtype, the function that communicates buckets.
        account: its operations count there. passes: backward passes in the window.
    Attributes:
        ready, placed: by gradient; ready: the last backward pass of the window has accumulated it.
        operations: by a number that is the same on all ranks: of a bucket its index.
        communicates: whether gradients are communicated; None: the algorithm has not been asked yet.
        failure: the error when the rest was posted. sent: whether everything is posted.
        passes_left: backward passes until it ends. overflow_known: whether the ranks have agreed on overflow.
    """

    def __init__(self, model: Model, layout: Layout,
                 communication: Callable[[int], Callable[[Bucket, ProcessSet], Pending]], account: Account,
                 passes: int) -> None:
        self.ready = [False] * len(layout.members)
        self.placed = [False] * len(layout.members)
        self.operations: dict[int, Any] = {}
        self.communicates: bool | None = None
        self.failure: Exception | None = None
        self.sent = False
        self.passes_left = passes
        self.overflow_known = False
        self._model = model
        self._layout = layout
        self._account = account
        self._communication = communication
        self._advancing: list[Any] = []     # multi-phase operations, see algorithms/exchange.py

    def place(self, index: int) -> None:
        """Places a complete gradient in its bucket, and posts the bucket when it is full."""
        model, bucket = self._model, self._layout.bucket_of[index]
        if bucket is None:
            name = f"{self._layout.name}.{self._layout.members[index].name}" + ".again" * (model.window > 0)
            self.operations[len(model.gradients) + index] = counted(
                self._account.byte_counter, model.source.communicate, index, name)
            self.placed[index] = True
            return
        bucket.place(index, model.source.prepare(index))
        self.placed[index] = True
        if bucket.missing == 0:
            self.post(model.gradients.index(bucket), bucket)

    def post(self, number: int, bucket: Bucket) -> None:
        """Posts a full bucket, and advances the multi-phase operations of earlier ones."""
        self._account.record.gradient_bytes += bucket.nbytes
        operation = counted(self._account.byte_counter, self._communication(bucket.dtype), bucket,
                            self._model.group)
        self.operations[number] = operation
        for earlier in self._advancing:
            earlier.advance()
        if hasattr(operation, "advance"):
            self._advancing.append(operation)

    def post_rest(self) -> None:
        """Posts what the backward passes have not posted, if gradients are communicated."""
        if self.communicates:
            for index, placed in enumerate(self.placed):
                if not placed:      # no backward pass has made it ready
                    self.place(index)
            for number, bucket in enumerate(self._model.gradients):
                if number not in self.operations:       # it could not be posted in the backward pass
                    self.post(number, bucket)
        self.sent = True

    def wait(self) -> Exception | None:
        """Waits for all operations. Returns the first failure, or None."""
        failure = None
        # In the same order on all ranks: an operation's wait() may post another one, and wait for that.
        for number, operation in sorted(self.operations.items()):
            try:
                operation.wait()
            except Exception as error:
                # Wait for the others first: the core is using their memory.
                failure = failure or self._with_gradient_names(error, number)
            for each in self._advancing:
                each.advance()
        return failure

    def _with_gradient_names(self, error, number):
        """An error; a disagreement about a bucket also names its gradients."""
        buckets = self._model.gradients
        if getattr(error, "status", None) != native.ERR_MISMATCH or number >= len(buckets):
            return error
        names = listed([member.name for member in buckets[number].members.values()])
        explained = HorovodInternalError(f"{error} ({buckets[number].name} holds the gradients of {names}.)")
        explained.status = error.status
        return explained


class DelayedWindow(Window):
    """A window that is posted as a whole, at its end, and waited for one window later.

    Its gradients get the results of the window before, and a copy of the replaced values is sent. A separate thread
    advances its multi-phase operations meanwhile. After wait_all(), wait() reports the failures.
    """

    def post(self, number: int, bucket: Bucket) -> None:
        views, source = bucket.views, self._model.source
        arrived = self._model.late.keep(str(number), lambda: delayed.DelayedGradients(views), shared=True, scaled=True,
                                        fits=lambda kept: kept.fits(views))
        indices = list(bucket.members)
        arrived.swap(views, lambda memory: source.hand_over(indices, memory))
        bucket.clear()
        for index, view in zip(indices, arrived.views, strict=True):
            bucket.place(index, view)
        super().post(number, bucket)

    def post_rest(self) -> None:
        super().post_rest()
        self.inits = runtime.inits
        self._thread = threading.Thread(target=_end, args=(self._advancing,), daemon=True)
        if self._advancing:
            self._thread.start()
        self._model = weakref.proxy(self._model)        # a discarded optimizer must not live on in runtime.in_flight
        del self._layout
        runtime.track(self)

    def finished(self) -> bool:
        """Whether wait_all() would not block. False for an algorithm's own operations without done()."""
        return not self._thread.is_alive() and all(
            getattr(operation, "done", lambda: False)() for operation in self.operations.values())

    def wait_all(self) -> None:
        """Blocks until all operations have ended, successfully or not."""
        if self._advancing:
            self._thread.join()
        _end([operation for _, operation in sorted(self.operations.items())])
        runtime.in_flight.discard(self)


def _end(operations: Iterable[Any]) -> None:
    for operation in operations:
        with suppress(Exception):
            operation.wait()
