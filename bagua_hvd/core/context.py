"""A rank's place in a job, and its operations, as Python objects.

An Operation keeps the memory of its tensors alive until the core is done with it, also when it is dropped early (an
interrupt, a handle never synchronized). Everything here may be called from any thread; cffi releases the GIL inside
native calls.

The structs that calls fill are pooled, since building them anew would cost more than a small allreduce in shared
memory. A call takes one from the pool, so threads never share one.
"""
from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from time import monotonic, perf_counter_ns
from typing import Any, NamedTuple

from bagua_hvd.core import completions
from bagua_hvd.core.native import (
    CHARS,
    IN_PROGRESS,
    NULL,
    OK,
    OP_SUM,
    UINTPTR,
    VOID_POINTER,
    Failure,
    TensorView,
    check,
    failure_of,
    ffi,
    lib,
    raise_failure,
    tensor_array,
)

# A wait looks at Python's signals this often, so that Ctrl-C ends it.
WAIT_SLICE_MS = 200
# For who waits for what the core says: a limit, to have one.
_RECORD_WAIT_MS = 3_600_000

_INT32S = ffi.typeof("int32_t[]")

# On which what is posted is counted, 1 to ACCOUNTS - 1; 0: nobody's. See Context.sent().
account: ContextVar[int] = ContextVar("account", default=0)
ACCOUNTS: int = lib.BHVD_ACCOUNTS


class Counters(NamedTuple):
    """Sums since the context was created; see struct bhvd_counters. blocked_ns: time that Python spent in waits, and in
    posts that wait."""

    operations: int
    executions: int
    payload_bytes_sent: int
    payload_bytes_received: int
    control_bytes_sent: int
    cache_hits: int
    cache_misses: int
    coordinator_ns: int
    negotiation_messages: int
    shm_bytes_sent: int
    tcp_bytes_sent: int
    mpi_bytes_sent: int
    nccl_bytes: int
    blocked_ns: int


class Sent(NamedTuple):
    """Bytes of tensors or their codes that went to other ranks, by what they went over."""

    shm_bytes: int
    tcp_bytes: int
    mpi_bytes: int


class MeasuredNetwork(NamedTuple):
    """Between the job's hosts, as the core chooses its schedules by; see struct bhvd_measured_network.

    Attributes:
        latency_s: one way, to the farthest rank; 0: one host. bytes_per_s: of the slowest line to rank 0 that was
            looked at; 0: one host, too quick to tell, or no TCP. Both 0 before the first operation.
    """

    latency_s: float = 0.0
    bytes_per_s: float = 0.0


Result = tuple[int, int, Any]       # of an operation, whose memory is Python's: nbytes, dim0, owner


class _Answer:
    """Where a native call puts what it answers. In the pool, `out` and the result's memory are NULL."""

    __slots__ = ("result", "out", "error")

    def __init__(self) -> None:
        self.result = ffi.new("struct bhvd_result *")
        self.out = ffi.new("bhvd_handle **")
        self.error = ffi.new("struct bhvd_error *")


_answers: list[_Answer] = []


def _take_answer() -> _Answer:
    try:
        return _answers.pop()
    except IndexError:
        return _Answer()


def _taken(result: Any) -> Result:
    """(nbytes, dim0, owner) of a struct bhvd_result whose memory is now Python's."""
    nbytes = result.nbytes
    return nbytes, result.dim0, ffi.gc(result.data, lib.bhvd_result_free) if nbytes else None


class Operation:
    """A posted operation. Holds the native handle and the memory of its tensors.

    It is made before there is a handle, which one store puts into it: wherever a signal's handler raises, either it has
    the handle, or who posts knows that it has not.
    """

    __slots__ = ("_handle", "_context", "_owners", "_status", "_failure", "_placement")

    def __init__(self, handle: Any, context: Context, owners: Any, placement: Any = None) -> None:
        self._handle = handle
        self._placement = placement
        self._context = context
        self._owners = owners
        self._status = IN_PROGRESS
        self._failure: Any = None       # a Failure, when it has failed

    def wait(self) -> None:
        """Blocks until the operation ended; raises as it ended. May be called again.

        On a GPU the results are on their way then: what the framework's current stream is given next comes after them.
        """
        status: int = self._status
        if status == IN_PROGRESS:
            answer = _take_answer()
            error = answer.error
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
            _answers.append(answer)
        if status == OK and self._placement is not None:
            self._join()
        if status != OK:
            raise_failure(self._failure)

    def _join(self) -> None:
        answer = _take_answer()
        status = lib.bhvd_handle_join(self._handle, ffi.cast(VOID_POINTER, self._placement.stream()), answer.error)
        failure = failure_of(answer.error) if status != OK else None
        _answers.append(answer)
        if failure:
            raise_failure(failure)

    def done(self) -> bool:
        """True once the operation ended, well or not. Never blocks."""
        return self._status != IN_PROGRESS or bool(lib.bhvd_poll(self._handle))

    def ended_within(self, seconds: float) -> bool:
        """Waits for its end, so long at most. Returns whether it ended, well or not: wait() then tells."""
        if self.done():
            return True
        deadline = monotonic() + seconds
        answer = _take_answer()
        status: int = IN_PROGRESS
        while status == IN_PROGRESS and (left := deadline - monotonic()) > 0:
            status = lib.bhvd_wait(self._handle, min(WAIT_SLICE_MS, math.ceil(left * 1000)), answer.error)
        _answers.append(answer)
        return bool(status != IN_PROGRESS)

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Calls callback() when it has ended; see completions.when_ended. Once for an operation."""
        completions.when_ended(self._handle, callback)

    @property
    def value(self) -> int:
        """The number an ended operation yields: last rank of a join, id of a process set."""
        return int(lib.bhvd_handle_value(self._handle))

    def result(self, index: int) -> Result:
        """Takes what the core allocated for tensor `index` (posted with dst 0): (nbytes, dim0, owner), see buffer().

        The memory lives as long as `owner`, None when there are no bytes. To be called once, after wait().
        """
        result = ffi.new("struct bhvd_result *")
        status = lib.bhvd_result_take(self._handle, index, result)
        if status != OK:
            raise_failure(Failure(status, f"the operation has no result {index}"))
        return _taken(result)

    def device_rows(self, index: int) -> int | None:
        """The first dimension of a result that NCCL left on the GPU; None: there is none, see result()."""
        result = ffi.new("struct bhvd_result *")
        if lib.bhvd_result(self._handle, index, result) != OK or not result.on_device:
            return None
        return int(result.dim0)

    def copy_result(self, index: int, address: int) -> None:
        """Copies a result that is on the GPU to memory there, in the order of the framework's current stream."""
        error = ffi.new("struct bhvd_error *")
        stream = ffi.cast(VOID_POINTER, self._placement.stream())
        check(lib.bhvd_result_copy(self._handle, index, ffi.cast(VOID_POINTER, address), stream, error), error)

    def received_splits(self, index: int, count: int) -> list[int]:
        """alltoall: the rows of tensor `index` received from each of the set's `count` ranks."""
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
    """An Operation that ended well while it was posted, as far as callers that block need one."""

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


class Context:
    """One rank's place in a job: its connections and its progress thread. Destroyed with its last reference.

    Args:
        options: an object with the attributes of common.environment.Options.
    Raises:
        ValueError: an option is wrong.
        HorovodInternalError: the other ranks did not appear in time, or the system refused.
    """

    __slots__ = ("_pointer", "abandoned", "blocked_ns", "gpus", "__weakref__")

    def __init__(self, options: Any) -> None:
        strings: list[Any] = []

        def text(value: str | None) -> Any:
            if value is None:
                return NULL
            strings.append(ffi.new(CHARS, value.encode()))
            return strings[-1]

        native = ffi.new("struct bhvd_context_options *")
        for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "rendezvous_port",
                     "fusion_threshold", "cache_capacity", "start_timeout_ms", "timeout_ms",
                     "heartbeat_timeout_ms", "stall_warning_ms", "stall_shutdown_ms", "streams",
                     "emulated_byte_ps", "negotiation_fanout", "nccl_levels"):
            setattr(native, name, getattr(options, name))
        for name in ("transport", "rendezvous_host", "scope", "listen_host", "host_id", "allreduce_path",
                     "negotiation"):
            setattr(native, name, text(getattr(options, name)))
        secret = ffi.from_buffer(options.secret)
        native.secret = secret
        native.secret_size = len(options.secret)
        native.inproc_world = options.inproc_world or NULL
        out = ffi.new("bhvd_context **")
        error = ffi.new("struct bhvd_error *")
        check(lib.bhvd_context_create(native, out, error), error)
        self._pointer = ffi.gc(out[0], lib.bhvd_context_destroy)
        self.abandoned: list[tuple[Any, Any]] = []      # handles, and what their operations still use
        self.blocked_ns = 0
        self.gpus: set[Any] = set()           # Devices that tensors of operations were on

    def post(self, kind: int, name: str, tensors: Sequence[TensorView] = (), *, process_set: int = 0, op: int = OP_SUM,
             prescale_factor: float = 1.0, postscale_factor: float = 1.0, root_rank: int = 0,
             splits: Sequence[int] | None = None, blocking: bool = False, received: bool = False, owner: Any = None,
             **primitive: Any) -> Posted:
        """Posts an operation; see bhvd_post. A blocking one over a tensor in the host's memory has mostly ended then.

        Args:
            kind: a native kind (ALLREDUCE, ...).
            name: full name; ranks match operations by it.
            tensors: TensorViews; more than one is a group, all or nothing.
            splits: int32 values: rows for each rank (alltoall), ranks (process sets).
            blocking: the caller waits at once, so that its thread makes the progress.
            received: received_splits() will be asked for.
            owner: kept alive until the operation ended, besides the owners of the tensors (for error states, replicas).
            primitive: other fields of struct bhvd_args, as cffi takes them; see floats() for its pointers.
        Returns:
            An Operation, or Ended.
        Raises:
            ValueError: this call is wrong, nothing was posted. HorovodInternalError: the context has failed, or a
            blocking operation has.
        """
        if self.abandoned:
            self._drop_abandoned()
        placement = tensors[0].placement if tensors else None
        simple = len(tensors) == 1 and placement is None and splits is None and not primitive
        try:
            if simple and not (blocking and received):
                return self._post_tensor(kind, name, tensors[0], process_set, op, prescale_factor, postscale_factor,
                                         root_rank, WAIT_SLICE_MS if blocking else 0, owner)
            return self._post_structs(kind, name, tensors, placement, process_set, op, prescale_factor,
                                      postscale_factor, root_rank, splits, blocking, owner, primitive)
        except OverflowError as error:      # no number of C is as large
            raise ValueError(f"'{name:.100}': {error}") from None

    def _post_structs(self, kind: int, name: str, tensors: Sequence[TensorView], placement: Any, process_set: int,
                      op: int, prescale_factor: float, postscale_factor: float, root_rank: int,
                      splits: Sequence[int] | None, blocking: bool, owner: Any, primitive: dict[str, Any]) -> Operation:
        """post() of whatever there is."""
        # Whatever is pointed to needs a name until the native call returned.
        name_chars = ffi.new(CHARS, name.encode())
        args = ffi.new("struct bhvd_args *", {
            "kind": kind, "process_set": process_set, "name": name_chars, "tensor_count": len(tensors), "op": op,
            "root_rank": root_rank, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor,
            "blocking": blocking, "device": -1, "account": account.get(), **primitive,
        })
        if tensors:
            for view in tensors:
                if view.placement is not placement:
                    raise ValueError(f"the tensors of '{name}' lie on different devices: move them to one")
            array = tensor_array(tensors)
            args.tensors = array[0]
        if splits is not None:
            split_array = ffi.new(_INT32S, splits)
            args.splits = split_array
            args.split_count = len(splits)
        if placement is not None:
            placement.device.place(args, placement.stream())
            self.gpus.add(placement.device)
        answer = _take_answer()
        operation = Operation(None, self, (tensors, owner), placement)
        try:
            status = lib.bhvd_post(self._pointer, args, answer.out, answer.error)
            operation._handle = answer.out[0]
        except BaseException:       # a signal's: the operation goes on
            self._abandon(operation, answer.out, (tensors, owner))
            raise
        answer.out[0] = NULL
        failure = failure_of(answer.error) if status != OK else None
        _answers.append(answer)
        if failure:
            raise_failure(failure)
        return operation

    def _abandon(self, operation: object, out: Any, owners: Any) -> None:
        """The memory of a posted operation outlives who posted it, unless `operation` has the handle in `out`."""
        if out[0] and not getattr(operation, "_handle", None):
            self.abandoned.append((out[0], owners))

    def _post_tensor(self, kind: int, name: str, view: TensorView, process_set: int, op: int, prescale_factor: float,
                     postscale_factor: float, root_rank: int, wait_ms: int, owner: Any) -> Posted:
        """post() of one tensor in the host's memory, and the first wait, without structs: see bhvd_post_tensor."""
        src, dst, shape, dtype, _ = view
        answer = _take_answer()
        result, out = answer.result, answer.out
        operation: Posted = _ENDED
        started = perf_counter_ns()
        try:
            status = lib.bhvd_post_tensor(
                self._pointer, kind, name.encode(), process_set, src, dst, shape, len(shape), dtype, op, root_rank,
                prescale_factor, postscale_factor, account.get(), wait_ms, result, out, answer.error,
            )
            if status == IN_PROGRESS:
                operation = posted = Operation(None, self, (view, owner))
                posted._handle = out[0]
        except BaseException:       # a signal's: the operation goes on, or has ended and left a result
            self._abandon(operation, out, (view, owner))
            lib.bhvd_result_free(result.data)
            raise
        if status == IN_PROGRESS:
            out[0] = NULL
        elif status != OK:
            failure = failure_of(answer.error)
            _answers.append(answer)
            raise_failure(failure)
        elif not dst:
            operation = Ended(_taken(result))
            result.data = NULL
        if wait_ms:
            self.blocked_ns += perf_counter_ns() - started
        _answers.append(answer)
        return operation

    def _drop_abandoned(self) -> None:
        # The list itself stays: an Operation that ends its life in another thread may be appending to it.
        for _ in range(len(self.abandoned)):
            try:
                entry = self.abandoned.pop(0)
            except IndexError:
                return
            if lib.bhvd_poll(entry[0]):
                lib.bhvd_handle_drop(entry[0])
            else:
                self.abandoned.append(entry)

    def counters(self) -> Counters:
        """The context's Counters."""
        native = ffi.new("struct bhvd_counters *")
        lib.bhvd_context_counters(self._pointer, native)
        return Counters._make([*(getattr(native, name) for name in Counters._fields[:-1]), self.blocked_ns])

    def sent(self, number: int) -> Sent:
        """What ended operations have sent that were posted with this number in `account`."""
        native = ffi.new("struct bhvd_sent *")
        lib.bhvd_context_sent(self._pointer, number, native)
        return Sent(native.shm_bytes, native.tcp_bytes, native.mpi_bytes)

    def network(self) -> MeasuredNetwork:
        """As measured at start and said with the last operation: equal on all ranks after the same one."""
        native = ffi.new("struct bhvd_measured_network *")
        lib.bhvd_context_network(self._pointer, native)
        return MeasuredNetwork(native.latency_s, native.bytes_per_s)

    def waited_for(self, size: int) -> list[tuple[int, int]]:
        """[(operations, nanoseconds)] of each of `size` ranks, see struct bhvd_waited_for; [] but on rank 0."""
        native = ffi.new("struct bhvd_waited_for[]", size)
        return [(entry.operations, entry.waited_ns)
                for entry in native[0:lib.bhvd_context_waited_for(self._pointer, native, size)]]

    def stalled(self, size: int) -> dict[int, tuple[int, list[str]]]:
        """By rank, the operations that others wait too long for it to ask for: their number, the names of a few.

        See bhvd_context_stalled; {} but on rank 0. size: of the job.
        """
        native = ffi.new("struct bhvd_stalled[]", size)
        return {entry.rank: (entry.operations, [ffi.string(name).decode(errors="replace")
                                                for name in entry.names[0:min(entry.operations, len(entry.names))]])
                for entry in native[0:lib.bhvd_context_stalled(self._pointer, native, size)]}

    def measure_coordinator(self) -> None:
        """Counts coordinator_ns from now on; only rank 0 has something to count."""
        lib.bhvd_context_measure_coordinator(self._pointer)

    def check(self) -> None:
        """Raises the reason when the context is not usable any more."""
        error = ffi.new("struct bhvd_error *")
        check(lib.bhvd_context_status(self._pointer, error), error)

    def first_loss(self) -> Failure:
        """The Failure of the first operation that another rank made fail; its `rank` and `cause` are None: none has."""
        error = ffi.new("struct bhvd_error *")
        lib.bhvd_context_first_loss(self._pointer, error)
        return failure_of(error)

    def wait_for_gpus(self) -> None:
        """Waits until the GPUs have done what ended operations put on them; see bhvd_context_wait_gpu.

        Raises:
            HorovodInternalError: that failed, or the context has.
        """
        for gpu in tuple(self.gpus):
            gpu.wait(self._pointer)

    def records(self) -> Iterator[tuple[int, str, int, str]]:
        """An iterator over what the core says: (level, file, line, text), see struct bhvd_record. For one thread.

        It blocks, without the GIL, until there is something; it ends when the context is shut down.
        """
        out = ffi.new("struct bhvd_record **")
        while (told := lib.bhvd_context_next_record(self._pointer, _RECORD_WAIT_MS, out)) >= 0:
            if told:
                record = ffi.gc(out[0], lib.bhvd_record_free)
                yield (record.level, ffi.string(record.file).decode(), record.line,
                       ffi.string(record.text).decode(errors="replace"))

    def start_timeline(self, path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Rank 0 writes a Chrome trace to `path` from now on; other ranks ignore it."""
        error = ffi.new("struct bhvd_error *")
        check(lib.bhvd_timeline_start(self._pointer, os.fsencode(path), mark_cycles, error), error)

    def stop_timeline(self) -> None:
        lib.bhvd_timeline_stop(self._pointer)

    def process_set_size(self, process_set: int) -> int:
        """Number of ranks, -1 when there is no such set."""
        return int(lib.bhvd_process_set_size(self._pointer, process_set))

    def process_set_rank(self, process_set: int) -> int:
        """This rank's position, -1 when it is not a member, -2 when there is no such set."""
        return int(lib.bhvd_process_set_rank(self._pointer, process_set))

    def process_set_hosts(self, process_set: int) -> int:
        """The number of hosts that its ranks are on, -1 when there is no such set or this rank is not a member."""
        return int(lib.bhvd_process_set_hosts(self._pointer, process_set))

    def process_set_hosts_of(self, process_set: int) -> list[int]:
        """Of each of its ranks, rising, the number of its host, from 0; empty when this rank is not a member."""
        size = self.process_set_size(process_set)
        hosts = ffi.new(_INT32S, max(size, 0))
        return list(hosts[0:max(0, lib.bhvd_process_set_hosts_of(self._pointer, process_set, hosts, size))])

    def process_set_ranks(self, process_set: int) -> list[int] | None:
        """The global ranks of the set, rising, or None when there is no such set."""
        size = self.process_set_size(process_set)
        if size < 0:
            return None
        ranks = ffi.new(_INT32S, size)
        return list(ranks[0:lib.bhvd_process_set_ranks(self._pointer, process_set, ranks, size)])

    @property
    def address(self) -> int:
        """The native context, for libraries that call the core by themselves; it lives as long as this object."""
        return int(ffi.cast(UINTPTR, self._pointer))

    def shutdown(self) -> None:
        """Leaves the job; operations in flight end with HorovodInternalError. Idempotent, safe while others wait."""
        lib.bhvd_context_shutdown(self._pointer)
        self._drop_abandoned()

    def close(self) -> None:
        """Frees the context now. No other thread may be using it, and it must not be used afterwards."""
        self.shutdown()
        ffi.release(self._pointer)

    def after_fork(self) -> None:
        """In a child process: makes the context unusable, and leaves the parent's connections alone."""
        lib.bhvd_context_after_fork(self._pointer)
        ffi.gc(self._pointer, None)     # the child must not destroy what the parent's threads own
