"""The buckets of a Reducer's gradients, and one window of them: which are ready, placed, posted and in flight.

A Window lives from one synchronize() of its Reducer to the next. With delay=1 it is a DelayedWindow, whose gradients
are applied one step late:

    gradients g_t, here the average of g_{t-1}  ->  swap()  ->  gradients are that average, g_t is here, in flight

Buffers are exchanged if the framework can release its own (Source.hand_over). Else both are copied.

Source: Li et al., Pipe-SGD, arXiv:1811.03619, with a width of two.
"""
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from bagua_hvd.core import native, vectors
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.native import TensorView
from bagua_hvd.core.operations import counted
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import runtime
from bagua_hvd.job.statistics import Account
from bagua_hvd.reduction.agreement import listed
from bagua_hvd.training.buckets import Bucket, Member, partition, partition_groups
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Pending


class Layout:
    """Which gradient is in which bucket: in the order of readiness, by the user's groups, or in none.

    Args:
        model: its `gradients` are the buckets. prescale_factor, postscale_factor: see Bucket.
    Attributes:
        name: prefix of the buckets' names, before their index. members: by index.
        bucket_of: by index; None: the gradient is communicated by itself.
        limit: bytes in a bucket; None: BAGUA_DEFAULT_BUCKET_SIZE.
    """

    def __init__(self, model: Model, prescale_factor: float, postscale_factor: float) -> None:
        self.name = ""
        self.members: list[Member] = []
        self.bucket_of: list[Bucket | None] = []
        self.limit: int | None = None
        self._model = model
        self._factors = prescale_factor, postscale_factor
        self._grouped = False       # the user has grouped the gradients

    def rename(self, name: str) -> None:
        """Changes the name."""
        self.name = name
        self.name_buckets()

    def name_buckets(self, suffix: str = "") -> None:
        """Names the buckets by their indices, with a suffix."""
        for place, bucket in enumerate(self._model.gradients):
            bucket.name = f"{self.name}.{place}{suffix}"

    def add(self, members: Sequence[Member], groups: Sequence[Sequence[int]] | None) -> None:
        """Adds members, numbered after the existing ones, in new buckets. groups: indices that share buckets."""
        numbered = dict(enumerate(members, len(self.members)))
        self.members = [*self.members, *members]
        self._grouped = self._grouped or groups is not None
        self.bucket_of = [*self.bucket_of, *[None] * len(members)]
        self._add_buckets(partition(numbered, self.limit) if groups is None else partition_groups(numbered, groups))
        self._model.add(numbered)

    def _add_buckets(self, plan: Iterable[Sequence[int]]) -> None:
        for indices in plan:
            members = {index: self.members[index] for index in indices}
            bucket = Bucket(f"{self.name}.{len(self._model.gradients)}", members, *self._factors, model=self._model)
            self._model.gradients.append(bucket)
            for index in indices:
                self.bucket_of[index] = bucket

    def remove(self, index: int) -> None:
        """Takes a gradient out of its bucket: it is communicated by itself from now on."""
        bucket = self.bucket_of[index]
        if bucket is not None:
            bucket.remove(index)
            self.bucket_of[index] = None
            if not bucket.members:
                self._model.gradients.remove(bucket)
                self.name_buckets()

    def bucketed(self) -> list[int]:
        """All gradients in buckets, in the order of the buckets."""
        return [index for bucket in self._model.gradients for index in bucket.members]

    def order(self, ready: Iterable[int] | None) -> list[int]:
        """All gradients in bucket order: first the ready ones; None: first those in buckets, as they are."""
        first = dict.fromkeys(self.bucketed() if ready is None else ready)
        return [*first, *(index for index in reversed(range(len(self.members))) if index not in first)]

    def arrange(self, order: Iterable[int], limit: int | None) -> None:
        """Rebuilds the buckets if the order or the limit has changed; the user's groups are kept."""
        order = [index for index in order if self.bucket_of[index] is not None]
        if not self._grouped and (order, limit) != (self.bucketed(), self.limit):
            self.limit = limit
            self._cut(partition({index: self.members[index] for index in reversed(order)}, limit))

    def restore(self, plan: Sequence[Sequence[int]], limit: int | None = None) -> bool:
        """Rebuilds the buckets as in a checkpoint. Returns whether it did; the user's groups are kept.

        Args:
            plan: the indices in each bucket. Members that are not in it follow in buckets of their own.
            limit: the bucket size of the plan.
        """
        planned = {index for indices in plan for index in indices}
        kinds = [{(self.members[index].dtype, self.members[index].device) for index in indices} for indices in plan]
        if self._grouped or not planned <= set(self.bucketed()) or any(len(kind) > 1 for kind in kinds):
            return False
        self.limit = limit
        rest = {index: self.members[index] for index in reversed(self.bucketed()) if index not in planned}
        self._cut([*plan, *partition(rest, limit)])
        return True

    def _cut(self, plan: Iterable[Sequence[int]]) -> None:
        self._model.gradients = []
        self._add_buckets(plan)


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

    def _with_gradient_names(self, error: Any, number: int) -> Any:
        """An error; a disagreement about a bucket also names its gradients."""
        buckets = self._model.gradients
        if getattr(error, "status", None) != native.ERR_MISMATCH or number >= len(buckets):
            return error
        names = listed([member.name for member in buckets[number].members.values()])
        explained = HorovodInternalError(f"{error} ({buckets[number].name} holds the gradients of {names}.)")
        explained.status = error.status
        return explained


Views = list[TensorView]
HandOver = Callable[[Views | None], tuple[Views, Views] | None]


def _as_bytes(views: Sequence[TensorView]) -> list[TensorView]:
    """The same memory as bytes, since NumPy has no bfloat16."""
    return [view._replace(shape=(vectors.count_of(view) * native.dtype_size(view.dtype),), dtype=native.UINT8)
            for view in views]


class DelayedGradients:
    """Values with the shapes and the dtype of some tensors, zeros at first; on the host, or in memory handed over.

    Args:
        views: TensorViews of these tensors, of one dtype.
    """

    def __init__(self, views: Sequence[TensorView]) -> None:
        self._dtype = views[0].dtype
        self._shapes = [view.shape for view in views]
        self._here: np.ndarray = np.zeros(sum(view.shape[0] for view in _as_bytes(views)), np.uint8)
        self._other = np.empty_like(self._here)
        self._given: Views | None = None        # handed over; used instead of _here

    def fits(self, views: Sequence[TensorView]) -> bool:
        """Whether tensors have these shapes and this dtype."""
        return self._shapes == [view.shape for view in views] and self._dtype == views[0].dtype

    def swap(self, views: Sequence[TensorView], hand_over: HandOver = lambda given: None) -> None:
        """Swaps these values with those of the tensors. None of them may be in flight.

        hand_over: like Source.hand_over, for these tensors.
        """
        handed = hand_over(self._given)
        if handed is not None:
            before, now = handed
            if self._given is None:
                vectors.unpack(_as_bytes(now), self._here)
            self._given = before
            return
        if self._given is not None:
            vectors.pack(_as_bytes(self._given), self._here)
            self._given = None
        vectors.pack(_as_bytes(views), self._other)
        vectors.unpack(_as_bytes(views), self._here)
        self._here, self._other = self._other, self._here

    @property
    def views(self) -> Views:
        """In-place TensorViews of these values, valid until the next swap()."""
        if self._given is not None:
            return self._given
        address, size, views = self._here.ctypes.data, native.dtype_size(self._dtype), []
        for shape in self._shapes:
            views.append(TensorView(address, address, shape, self._dtype, self._here))
            address += vectors.count_of(views[-1]) * size
        return views

    def _floats(self) -> np.ndarray:
        wide = np.float64 if self._dtype == native.FLOAT64 else np.float32
        floats: np.ndarray = np.empty(self._here.size // native.dtype_size(self._dtype), wide)
        vectors.pack(self.views, floats)
        return floats

    def finite(self) -> bool:
        """Whether all values are finite."""
        return bool(np.isfinite(self._floats()).all())

    def scale(self, factor: float) -> None:
        """Multiplies the values, after the gradients' unit has changed."""
        vectors.unpack(self.views, self._floats() * np.float32(factor))

    def state_dict(self) -> dict[str, Any]:
        if self._given is not None:
            vectors.pack(_as_bytes(self._given), self._here)
        return {"dtype": native.dtype_name(self._dtype), "data": self._here.tobytes()}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Returns False, and changes nothing, when the state is of another size or dtype."""
        if state["dtype"] != native.dtype_name(self._dtype) or len(state["data"]) != self._here.size:
            return False
        self._given = None
        self._here[:] = np.frombuffer(state["data"], np.uint8)
        return True


class DelayedWindow(Window):
    """A window that is posted as a whole, at its end, and waited for one window later.

    Its gradients get the results of the window before, and a copy of the replaced values is sent. A separate thread
    advances its multi-phase operations meanwhile. After wait_all(), wait() reports the failures.
    """

    def post(self, number: int, bucket: Bucket) -> None:
        views, source = bucket.views, self._model.source
        arrived = self._model.late.keep(str(number), lambda: DelayedGradients(views), shared=True, scaled=True,
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
