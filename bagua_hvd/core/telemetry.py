"""Measurements of a context: counters, the network, late ranks, the core's log, a timeline."""
from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from bagua_hvd.core.native import Failure, call, failure_of, ffi, lib

# Timeout of one wait for a log record: only because the call needs one.
_RECORD_WAIT_MS = 3_600_000


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


class MeasuredNetwork(NamedTuple):
    """The network between the job's hosts, by which the core chooses schedules; see struct bhvd_measured_network.

    Attributes:
        latency_s: one way, to the farthest rank; 0: one host. bytes_per_s: of the slowest measured line to rank 0; 0:
            one host, too fast to measure, or no TCP. Both are 0 before the first operation.
    """

    latency_s: float = 0.0
    bytes_per_s: float = 0.0


class Telemetry:
    """The read-only part of a Context."""

    __slots__ = ()
    _pointer: Any
    blocked_ns: int

    def counters(self) -> Counters:
        """The context's Counters."""
        native = ffi.new("struct bhvd_counters *")
        lib.bhvd_context_counters(self._pointer, native)
        return Counters._make([*(getattr(native, name) for name in Counters._fields[:-1]), self.blocked_ns])

    def sent(self, number: int) -> Sent:
        """Bytes sent by ended operations that were posted with `byte_counter` set to this number."""
        native = ffi.new("struct bhvd_sent *")
        lib.bhvd_context_sent(self._pointer, number, native)
        return Sent(native.shm_bytes, native.tcp_bytes, native.mpi_bytes)

    def network(self) -> MeasuredNetwork:
        """Measured at start and sent along with the last operation: equal on all ranks after the same operation."""
        native = ffi.new("struct bhvd_measured_network *")
        lib.bhvd_context_network(self._pointer, native)
        return MeasuredNetwork(native.latency_s, native.bytes_per_s)

    def waited_for(self, size: int) -> list[tuple[int, int]]:
        """[(operations, nanoseconds)] of each of `size` ranks, see struct bhvd_waited_for; [] except on rank 0."""
        native = ffi.new("struct bhvd_waited_for[]", size)
        return [(entry.operations, entry.waited_ns)
                for entry in native[0:lib.bhvd_context_waited_for(self._pointer, native, size)]]

    def stalled(self, size: int) -> dict[int, tuple[int, list[str]]]:
        """By rank, operations that it has not requested and others wait too long for: their number, names of a few.

        See bhvd_context_stalled; {} except on rank 0. size: of the job.
        """
        native = ffi.new("struct bhvd_stalled[]", size)
        return {entry.rank: (entry.operations, [ffi.string(name).decode(errors="replace")
                                                for name in entry.names[0:min(entry.operations, len(entry.names))]])
                for entry in native[0:lib.bhvd_context_stalled(self._pointer, native, size)]}

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
