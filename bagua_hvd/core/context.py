"""A rank's place in a job: made by init(), with its connections, its progress thread, and what it measures."""
from __future__ import annotations

import hashlib
import hmac
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from bagua_hvd.core import log, native
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.native import Failure, call, failure_of, ffi, lib
from bagua_hvd.core.operations import Posting

# Timeout of one wait for a log record: only because the call needs one.
_RECORD_WAIT_MS = 3_600_000
_JOIN_SECONDS = 1


class Counters(NamedTuple):
    """Sums since the context was created; see struct bhvd_counters. blocked_ns: time that Python spent in waits and in
    blocking posts."""

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
    """Bytes of tensors or their codes sent to other ranks, by transport."""

    shm_bytes: int
    tcp_bytes: int
    mpi_bytes: int


class Network(NamedTuple):
    """The network between a job's hosts; seconds, bytes. latency_s: one way. bytes_per_s: of each line."""

    latency_s: float
    bytes_per_s: float


def _proofs(secret: bytes, sender: bytes, receiver: bytes) -> bytes:
    """What one rank sends to another when a channel is connected, for each channel: native/transport/auth.h."""
    key = hmac.digest(secret, sender + receiver, "sha256")
    return hashlib.shake_256(key).digest(lib.BHVD_CHANNELS * lib.BHVD_PROOF_BYTES)


@ffi.def_extern(name="bhvd_python_gather", error=lib.BHVD_ERR_SYSTEM)
def _gather(user: Any, mine: Any, nbytes: int, everything: Any, proofs: Any, error: Any) -> int:
    gatherer = ffi.from_handle(user)
    try:
        own = bytes(ffi.buffer(mine, nbytes))
        endpoints = gatherer.gather(own)
        ffi.memmove(everything, endpoints, len(endpoints))
        for rank, start in enumerate(range(0, len(endpoints), nbytes)):
            other = endpoints[start:start + nbytes]
            if other != own:
                made = _proofs(gatherer.secret, own, other) + _proofs(gatherer.secret, other, own)
                ffi.memmove(proofs + rank, made, len(made))
        return native.OK
    except BaseException as failure:
        gatherer.failure = failure
        return native.fill_error(error, lib.BHVD_ERR_SYSTEM, str(failure))


class Context(Posting):
    """One rank's place in a job: its connections and its progress thread. Destroyed with its last reference.

    Args:
        options: an object with the attributes of job.environment.Options.
        gather: called with this rank's endpoint, bytes; returns those of all ranks, in order: rendezvous.py. Its
            exception ends the construction. Unused with one rank.
    Raises:
        ValueError: an option is wrong.
        HorovodInternalError: the other ranks did not connect in time, or a system call failed.
    """

    __slots__ = ()

    def __init__(self, options: Any, gather: Callable[[bytes], bytes]) -> None:
        gatherer = SimpleNamespace(gather=gather, secret=options.secret, failure=None)
        user = ffi.new_handle(gatherer)
        values = {**vars(options), "user": user, "gather": lib.bhvd_python_gather}
        fields = {}         # keep alive the memory that the core reads
        for name, _ in ffi.typeof("struct bhvd_context_options").fields:
            value = values[name]
            if value is not None:       # else NULL
                fields[name] = ffi.new(native.CHARS, value.encode()) if isinstance(value, str) else value
        filled = ffi.new("struct bhvd_context_options *", fields)
        out = ffi.new("bhvd_context **")
        try:
            call(lib.bhvd_context_create, filled, out)
        except (ValueError, HorovodInternalError):
            if gatherer.failure is not None:
                raise gatherer.failure from None
            raise
        super().__init__(ffi.gc(out[0], lib.bhvd_context_destroy))

    def await_state(self, awaits: bool) -> None:
        """While `awaits` is true, operations raise ValueError: a running elastic job would not take part in them."""
        lib.bhvd_context_await_state(self._pointer, awaits)

    def check(self) -> None:
        """Raises the reason why the context is not usable any more; else does nothing."""
        call(lib.bhvd_context_status, self._pointer)

    def wait_for_gpus(self) -> None:
        """Waits until the GPUs have finished the work that ended operations queued; see bhvd_context_wait_gpu.

        Raises:
            HorovodInternalError: the wait failed, or the context has failed.
        """
        for gpu in tuple(self.gpus):
            gpu.wait(self._pointer)

    def process_set_size(self, process_set: int) -> int:
        """Number of ranks; -1 if there is no such set."""
        return int(lib.bhvd_process_set_size(self._pointer, process_set))

    def process_set_rank(self, process_set: int) -> int:
        """This rank's position; -1 if it is not a member, -2 if there is no such set."""
        return int(lib.bhvd_process_set_rank(self._pointer, process_set))

    def process_set_hosts(self, process_set: int) -> int:
        """Number of hosts that the set's ranks run on; -1 if there is no such set or this rank is not a member."""
        return int(lib.bhvd_process_set_hosts(self._pointer, process_set))

    @property
    def address(self) -> int:
        """The native context, for libraries that call the core themselves; it lives as long as this object."""
        return int(ffi.cast(native.UINTPTR, self._pointer))

    def shutdown(self) -> None:
        """Leaves the job; operations in flight end with HorovodInternalError. Idempotent, safe while threads wait."""
        lib.bhvd_context_shutdown(self._pointer)
        self._drop_abandoned()

    def close(self) -> None:
        """Frees the context now. No other thread may be using it, and it must not be used afterwards."""
        self.shutdown()
        ffi.release(self._pointer)

    def after_fork(self) -> None:
        """In a child process: makes the context unusable and leaves the parent's connections untouched."""
        lib.bhvd_context_after_fork(self._pointer)
        ffi.gc(self._pointer, None)     # the child must not destroy what the parent's threads own

    # ---- measurements: counters, the network, late ranks, the core's log, a timeline

    def counters(self) -> Counters:
        """The context's Counters."""
        filled = ffi.new("struct bhvd_counters *")
        lib.bhvd_context_counters(self._pointer, filled)
        return Counters._make([*(getattr(filled, name) for name in Counters._fields[:-1]), self.blocked_ns])

    def sent(self, number: int) -> Sent:
        """Bytes sent by ended operations that were posted with `byte_counter` set to this number."""
        filled = ffi.new("struct bhvd_sent *")
        lib.bhvd_context_sent(self._pointer, number, filled)
        return Sent(filled.shm_bytes, filled.tcp_bytes, filled.mpi_bytes)

    def network(self) -> Network:
        """The network by which the core chooses schedules; see struct bhvd_measured_network.

        Measured at start and sent along with the last operation: equal on all ranks after the same operation. The
        latency is that to the farthest rank; 0: one host. The rate is that of the slowest measured line to rank 0; 0:
        one host, too fast to measure, or no TCP. Both are 0 before the first operation.
        """
        filled = ffi.new("struct bhvd_measured_network *")
        lib.bhvd_context_network(self._pointer, filled)
        return Network(filled.latency_s, filled.bytes_per_s)

    def waited_for(self, size: int) -> list[tuple[int, int]]:
        """[(operations, nanoseconds)] of each of `size` ranks, see struct bhvd_waited_for; [] except on rank 0."""
        filled = ffi.new("struct bhvd_waited_for[]", size)
        return [(entry.operations, entry.waited_ns)
                for entry in filled[0:lib.bhvd_context_waited_for(self._pointer, filled, size)]]

    def stalled(self, size: int) -> dict[int, tuple[int, list[str]]]:
        """By rank, operations that it has not requested and others wait too long for: their number, names of a few.

        See bhvd_context_stalled; {} except on rank 0. size: of the job.
        """
        filled = ffi.new("struct bhvd_stalled[]", size)
        return {entry.rank: (entry.operations, [ffi.string(name).decode(errors="replace")
                                                for name in entry.names[0:min(entry.operations, len(entry.names))]])
                for entry in filled[0:lib.bhvd_context_stalled(self._pointer, filled, size)]}

    def first_loss(self) -> Failure:
        """The Failure of the first operation that another rank made fail; `rank` and `cause` are None if none has."""
        error = ffi.new("struct bhvd_error *")
        lib.bhvd_context_first_loss(self._pointer, error)
        return failure_of(error)

    def records(self) -> Iterator[tuple[int, str, int, str]]:
        """Iterates over the core's log: (level, file, line, text), see struct bhvd_record. For one thread.

        Blocks without the GIL until there is a record; ends when the context is shut down.
        """
        out = ffi.new("struct bhvd_record **")
        while (found := lib.bhvd_context_next_record(self._pointer, _RECORD_WAIT_MS, out)) >= 0:
            if found:
                record = ffi.gc(out[0], lib.bhvd_record_free)
                yield (record.level, ffi.string(record.file).decode(), record.line,
                       ffi.string(record.text).decode(errors="replace"))

    def start_timeline(self, path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Makes rank 0 write a Chrome trace to `path` from now on; other ranks ignore it."""
        call(lib.bhvd_timeline_start, self._pointer, os.fsencode(path), mark_cycles)

    def stop_timeline(self) -> None:
        lib.bhvd_timeline_stop(self._pointer)


class Listener:
    """Turns a context's messages into logging records, in a thread that waits for them, until it is shut down.

    The core cannot call Python: it would wait for the GIL with its lock held, while the thread with the GIL may wait
    for the core. So it puts its messages into a queue, and this thread, which sleeps in the core without the GIL, takes
    them out. LOG_STALLED messages (other ranks wait for this one) are logged with the stacks of this process.

    Args:
        steps: function that returns the number of optimizer steps made.
    """

    def __init__(self, context: Any, steps: Callable[[], int]) -> None:
        self._thread = threading.Thread(target=_listen, args=(context, steps), name="bagua_hvd log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Called after the context is shut down: waits up to a second for the thread to log the rest."""
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)


def _listen(context: Any, steps: Callable[[], int]) -> None:
    for level, file, line, text in context.records():
        try:
            if level == native.LOG_STALLED:
                log.logger.warning("%s", _report(text, steps()))
            else:
                log.log_from(file, line, level, text)
        except Exception:
            # Raised by a handler of the script. Later messages are logged nevertheless.
            traceback.print_exc()


def _report(names: str, steps: int) -> str:
    text = [f"the other ranks wait for rank {log.rank()} with [{names}]. It has made {steps} optimizer steps. Its "
            "stacks (most recent call last):\n"]
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.ident in frames:
            text += [f"  Thread {thread.name}:\n", *traceback.format_stack(frames[thread.ident])]
    return "".join(text).rstrip("\n")
