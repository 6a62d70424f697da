"""Operations as Python objects, how they are posted, and callbacks at their end.

An Operation keeps the memory of its tensors alive until the core is done with it, even if it is dropped early (an
interrupt, a handle never synchronized). All functions here are thread-safe; cffi releases the GIL inside native calls.

The structs for native calls are pooled: allocating them would cost more than a small allreduce in shared memory. Each
call takes one from the pool, so threads never share one.
"""
from __future__ import annotations

import itertools
import math
import os
import struct
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from time import monotonic, perf_counter_ns
from typing import Any

from bagua_hvd.core.native import (
    CHARS,
    ERR_ARGUMENT,
    IN_PROGRESS,
    NULL,
    OK,
    OP_SUM,
    UINTPTR,
    VOID_POINTER,
    Failure,
    TensorView,
    call,
    failure_of,
    ffi,
    lib,
    raise_failure,
)

# A wait checks Python's signals this often, so that Ctrl-C ends it.
WAIT_SLICE_MS = 200

_INT32S = ffi.typeof("int32_t[]")
_INT64S = ffi.typeof("int64_t[]")
_TENSORS = ffi.typeof("struct bhvd_tensor[]")
# struct bhvd_tensor, for struct.pack: its fields in order, and padding up to the next struct.
_TENSOR = "PPPiii0P"

# Counter of bytes sent that new operations add to, 1 to BYTE_COUNTERS - 1; 0: none. See Context.sent().
byte_counter: ContextVar[int] = ContextVar("byte_counter", default=0)
BYTE_COUNTERS: int = lib.BHVD_BYTE_COUNTERS


def counted(counter: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function; operations that it posts add to this counter of bytes sent."""
    token = byte_counter.set(counter)
    try:
        return function(*arguments)
    finally:
        byte_counter.reset(token)


def tensor_array(tensors: Sequence[TensorView]) -> tuple[Any, Any]:
    """The native array over `tensors`, and an object that must live as long as the array."""
    dims: list[int] = []
    for view in tensors:
        dims += view.shape
    shapes = ffi.new(_INT64S, dims or 1)
    at = int(ffi.cast(UINTPTR, shapes))
    fields: list[int] = []
    for view in tensors:
        src, dst, shape, dtype, _, _, dst_on_host = view
        fields += src, dst, at, len(shape), dtype, dst_on_host
        at += 8 * len(shape)
    # One pack for all tensors: setting cffi's attributes takes four times as long for a bucket of many small tensors.
    array = ffi.new(_TENSORS, len(tensors))
    struct.pack_into(_TENSOR * len(tensors), ffi.buffer(array), 0, *fields)
    return array, shapes


Result = tuple[int, int, Any]       # (nbytes, dim0, owner) of a result in memory owned by Python


# Output structs of a native call: (result, handle, error). In the pool, the handle and the result's memory are NULL.
_out_params: list[tuple[Any, Any, Any]] = []


def _take_out_params() -> tuple[Any, Any, Any]:
    try:
        return _out_params.pop()
    except IndexError:
        return ffi.new("struct bhvd_result *"), ffi.new("bhvd_handle **"), ffi.new("struct bhvd_error *")


def _taken(result: Any) -> Result:
    """(nbytes, dim0, owner) of a struct bhvd_result; Python now owns its memory."""
    nbytes = result.nbytes
    return nbytes, result.dim0, ffi.gc(result.data, lib.bhvd_result_free) if nbytes else None


class _Completions:
    """The core's list of ended operations and the threads that call their callbacks. Lives as long as the process.

    For futures and chains of operations, whose owners must not wait. The threads sleep in the core, which wakes one for
    each operation that ends. While all threads run callbacks, one more is started; so a callback may take long, or wait
    for another operation. A caller that can wait for its operation should wait: its thread then makes the progress.
    """

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
_completions_lock = threading.Lock()
_completions: _Completions | None = None


def _after_fork_in_child() -> None:
    global _completions, _completions_lock
    _completions, _completions_lock = None, threading.Lock()    # threads do not survive a fork


os.register_at_fork(after_in_child=_after_fork_in_child)


class Operation:
    """A posted operation. Holds the native handle and the memory of its tensors.

    It is created before the post, and a single store puts the handle into it. So when a signal handler raises, either
    it has the handle, or the posting code knows that it has not.
    """

    __slots__ = ("_handle", "_context", "_owners", "_status", "_failure", "_placement")

    def __init__(self, context: Posting, owners: Any, placement: Any = None) -> None:
        self._handle: Any = None
        self._placement = placement
        self._context = context
        self._owners = owners
        self._status = IN_PROGRESS
        self._failure: Any = None       # a Failure if it has failed

    def wait(self) -> None:
        """Blocks until the operation has ended; raises if it failed. May be called again.

        On a GPU the results may still be in flight, but work queued later on the framework's current stream sees them.
        """
        status: int = self._status
        if status == IN_PROGRESS:
            params = _take_out_params()
            error = params[2]
            handle = self._handle
            started = perf_counter_ns()
            status = lib.bhvd_wait(handle, WAIT_SLICE_MS, error)
            while status == IN_PROGRESS:
                status = lib.bhvd_wait(handle, WAIT_SLICE_MS, error)
            self._context.blocked_ns += perf_counter_ns() - started
            if status != OK:
                self._failure = failure_of(error)
            self._status = status
            self._owners = None
            _out_params.append(params)
        if status == OK and self._placement is not None:
            self._join()
        if status != OK:
            raise_failure(self._failure)

    def _join(self) -> None:
        params = _take_out_params()
        error = params[2]
        status = lib.bhvd_handle_join(self._handle, ffi.cast(VOID_POINTER, self._placement.stream()), error)
        failure = failure_of(error) if status != OK else None
        _out_params.append(params)
        if failure:
            raise_failure(failure)

    def done(self) -> bool:
        """True once the operation has ended, with or without an error. Never blocks."""
        return self._status != IN_PROGRESS or bool(lib.bhvd_poll(self._handle))

    def ended_within(self, seconds: float) -> bool:
        """Waits at most `seconds`. Returns whether the operation has ended; wait() then says whether it failed."""
        if self.done():
            return True
        deadline = monotonic() + seconds
        params = _take_out_params()
        status: int = IN_PROGRESS
        while status == IN_PROGRESS and (left := deadline - monotonic()) > 0:
            status = lib.bhvd_wait(self._handle, min(WAIT_SLICE_MS, math.ceil(left * 1000)), params[2])
        _out_params.append(params)
        return bool(status != IN_PROGRESS)

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Calls callback() once the operation has ended, with or without an error; soon, if it has ended already.

        callback() runs on a thread of _Completions and may block; callbacks run concurrently, in any order. An
        operation takes one callback, and may be dropped before it runs.
        """
        global _completions
        with _completions_lock:
            if _completions is None:
                _completions = _Completions()
        _completions.add(self._handle, callback)

    @property
    def value(self) -> int:
        """The number an ended operation yields: last rank of a join, id of a process set."""
        return int(lib.bhvd_handle_value(self._handle))

    def result(self, index: int) -> Result:
        """Takes tensor `index`'s result from the core (posted with dst 0): (nbytes, dim0, owner), see buffer().

        The memory lives as long as `owner`, which is None for 0 bytes. Call it once, after wait().
        """
        result = ffi.new("struct bhvd_result *")
        status = lib.bhvd_result_take(self._handle, index, result)
        if status != OK:
            raise_failure(Failure(status, f"the operation has no result {index}"))
        return _taken(result)

    def device_rows(self, index: int) -> int | None:
        """The first dimension of a result that NCCL left on the GPU; None: it is on the host, see result()."""
        result = ffi.new("struct bhvd_result *")
        if lib.bhvd_result(self._handle, index, result) != OK or not result.on_device:
            return None
        return int(result.dim0)

    def copy_result(self, index: int, address: int) -> None:
        """Copies a result from GPU memory to GPU memory at `address`, in the framework's current stream."""
        stream = ffi.cast(VOID_POINTER, self._placement.stream())
        call(lib.bhvd_result_copy, self._handle, index, ffi.cast(VOID_POINTER, address), stream)

    def received_splits(self, index: int, count: int) -> list[int]:
        """For alltoall: the rows of tensor `index` received from each of the set's `count` ranks."""
        splits = ffi.new(_INT32S, count)
        status = lib.bhvd_received_splits(self._handle, index, splits, count)
        if status != OK:
            raise_failure(Failure(
                status, f"the operation has no received splits for tensor {index} and {count} ranks"))
        return list(splits)

    def __del__(self) -> None:
        if not getattr(self, "_handle", None):
            return                  # nothing was posted
        if self._status == IN_PROGRESS and not lib.bhvd_poll(self._handle):
            # The core still reads and writes the tensors: their memory must outlive this object.
            self._context.abandoned.append((self._handle, self._owners))
        else:
            lib.bhvd_handle_drop(self._handle)


class Ended:
    """The part of Operation's interface that blocking callers need, for an operation that succeeded in its post."""

    __slots__ = ("_result",)

    def __init__(self, result: Result = (0, 0, None)) -> None:
        self._result = result

    def wait(self) -> None:
        """Does nothing."""

    def result(self, index: int) -> Result:
        """See Operation.result."""
        return self._result

    def done(self) -> bool:
        return True

    def ended_within(self, seconds: float) -> bool:
        return True

    def when_ended(self, callback: Callable[[], object]) -> None:
        callback()


_ENDED = Ended()
Posted = Operation | Ended


class Posting:
    """The part of Context that posts operations.

    Attributes:
        abandoned: (handle, owners) of operations that no caller waits for, and the memory that they still use.
        blocked_ns: time that Python spent in waits and in blocking posts.
        gpus: Devices of tensors posted so far.
    """

    __slots__ = ("_pointer", "abandoned", "blocked_ns", "gpus", "__weakref__")

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer
        self.abandoned: list[tuple[Any, Any]] = []
        self.blocked_ns = 0
        self.gpus: set[Any] = set()

    def post(self, kind: int, name: str, tensors: Sequence[TensorView] = (), *, process_set: int = 0, op: int = OP_SUM,
             prescale_factor: float = 1.0, postscale_factor: float = 1.0, root_rank: int = 0,
             splits: Sequence[int] | None = None, blocking: bool = False, received: bool = False, owner: Any = None,
             stream: Any = None, **primitive: Any) -> Posted:
        """Posts an operation; see bhvd_post. A blocking post of one tensor in host memory has usually ended on return.

        Args:
            kind: a native kind (ALLREDUCE, ...).
            name: full name, by which ranks match operations.
            tensors: TensorViews; several form a group, which succeeds or fails as one.
            splits: int32 values: rows for each rank (alltoall), or ranks (process sets).
            blocking: the caller waits at once, so its thread makes the progress.
            received: received_splits() will be called.
            owner: kept alive until the operation ends, like the owners of the tensors (for error states, replicas).
            stream: the framework's stream that wrote the tensors on a GPU; None: the current one.
            primitive: other fields of struct bhvd_args, as cffi takes them; see floats() for its pointers.
        Raises:
            ValueError: the call is wrong and nothing was posted. HorovodInternalError: the context or a blocking
            operation has failed.
        """
        if self.abandoned:
            self._drop_abandoned()
        placement = tensors[0].placement if tensors else None
        simple = len(tensors) == 1 and placement is None and splits is None and not primitive
        try:
            if simple and not (blocking and received):
                return self._post_tensor(kind, name, tensors[0], process_set, op, prescale_factor, postscale_factor,
                                         root_rank, WAIT_SLICE_MS if blocking else 0, owner)
            # Everything pointed to needs a name until the native call has returned.
            name_chars = ffi.new(CHARS, name.encode())
            args = ffi.new("struct bhvd_args *", {
                "kind": kind, "process_set": process_set, "name": name_chars, "tensor_count": len(tensors), "op": op,
                "root_rank": root_rank, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor,
                "blocking": blocking, "device": -1, "byte_counter": byte_counter.get(), **primitive,
            })
            if splits is not None:
                split_array = ffi.new(_INT32S, splits)
                args.splits = split_array
                args.split_count = len(splits)
        except OverflowError as overflow:   # larger than C's type
            raise ValueError(f"'{name:.100}': {overflow}") from None
        if tensors:
            for view in tensors:
                if view.placement is not placement:
                    raise ValueError(f"the tensors of '{name}' lie on different devices: move them to one")
            array = tensor_array(tensors)
            args.tensors = array[0]
        if placement is not None:
            placement.device.place(args, placement.stream() if stream is None else stream)
            self.gpus.add(placement.device)
        _, out, error = params = _take_out_params()
        operation = Operation(self, (tensors, owner), placement)
        try:
            status = lib.bhvd_post(self._pointer, args, out, error)
            operation._handle = out[0]
        except BaseException:       # from a signal handler: the operation continues
            self._abandon(operation, out, (tensors, owner))
            raise
        out[0] = NULL
        failure = failure_of(error) if status != OK else None
        _out_params.append(params)
        if failure:
            raise_failure(failure)
        return operation

    def _abandon(self, operation: object, out: Any, owners: Any) -> None:
        """Keeps a posted operation's memory alive without its caller, unless `operation` has the handle in `out`."""
        if out[0] and not getattr(operation, "_handle", None):
            self.abandoned.append((out[0], owners))

    def _post_tensor(self, kind: int, name: str, view: TensorView, process_set: int, op: int, prescale_factor: float,
                     postscale_factor: float, root_rank: int, wait_ms: int, owner: Any) -> Posted:
        """post() of one tensor in host memory, and the first wait, without structs: see bhvd_post_tensor."""
        src, dst, shape, dtype, _, _, _ = view
        result, out, error = params = _take_out_params()
        operation: Posted = _ENDED
        started = perf_counter_ns()
        try:
            status = lib.bhvd_post_tensor(
                self._pointer, kind, name.encode(), process_set, src, dst, shape, len(shape), dtype, op, root_rank,
                prescale_factor, postscale_factor, byte_counter.get(), wait_ms, result, out, error,
            )
            if status == IN_PROGRESS:
                operation = posted = Operation(self, (view, owner))
                posted._handle = out[0]
        except BaseException:       # from a signal handler: the operation continues, or has ended and left a result
            self._abandon(operation, out, (view, owner))
            lib.bhvd_result_free(result.data)
            raise
        if status == IN_PROGRESS:
            out[0] = NULL
        elif status != OK:
            failure = failure_of(error)
            _out_params.append(params)
            raise_failure(failure)
        elif not dst:
            operation = Ended(_taken(result))
            result.data = NULL
        if wait_ms:
            self.blocked_ns += perf_counter_ns() - started
        _out_params.append(params)
        return operation

    def _drop_abandoned(self) -> None:
        # Not a new list: an Operation that is being deleted in another thread may append to this one.
        for _ in range(len(self.abandoned)):
            try:
                entry = self.abandoned.pop(0)
            except IndexError:
                return
            if lib.bhvd_poll(entry[0]):
                lib.bhvd_handle_drop(entry[0])
            else:
                self.abandoned.append(entry)
