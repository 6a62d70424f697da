"""A rank's place in a job: made by init(), with its connections and its progress thread."""
from __future__ import annotations

from typing import Any

from bagua_hvd.core.native import CHARS, NULL, UINTPTR, check, ffi, lib
from bagua_hvd.core.operations import Posting
from bagua_hvd.core.telemetry import Telemetry

_INT32S = ffi.typeof("int32_t[]")


class Context(Posting, Telemetry):
    """One rank's place in a job: its connections and its progress thread. Destroyed with its last reference.

    Args:
        options: an object with the attributes of job.environment.Options.
    Raises:
        ValueError: an option is wrong.
        HorovodInternalError: the other ranks did not appear in time, or the system refused.
    """

    __slots__ = ()

    def __init__(self, options: Any) -> None:
        strings: list[Any] = []

        def text(value: str | None) -> Any:
            if value is None:
                return NULL
            strings.append(ffi.new(CHARS, value.encode()))
            return strings[-1]

        native = ffi.new("struct bhvd_context_options *")
        for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "rendezvous_port",
                     "listen_port", "listen_port_last",
                     "fusion_threshold", "cache_capacity", "start_timeout_ms", "timeout_ms",
                     "heartbeat_timeout_ms", "stall_warning_ms", "stall_shutdown_ms", "streams",
                     "emulated_bytes_per_s", "known_bytes_per_s", "negotiation_fanout", "nccl_levels"):
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
        super().__init__(ffi.gc(out[0], lib.bhvd_context_destroy))

    def check(self) -> None:
        """Raises the reason when the context is not usable any more."""
        error = ffi.new("struct bhvd_error *")
        check(lib.bhvd_context_status(self._pointer, error), error)

    def wait_for_gpus(self) -> None:
        """Waits until the GPUs have done what ended operations put on them; see bhvd_context_wait_gpu.

        Raises:
            HorovodInternalError: that failed, or the context has.
        """
        for gpu in tuple(self.gpus):
            gpu.wait(self._pointer)

    def process_set_size(self, process_set: int) -> int:
        """Number of ranks, -1 when there is no such set."""
        return int(lib.bhvd_process_set_size(self._pointer, process_set))

    def process_set_rank(self, process_set: int) -> int:
        """This rank's position, -1 when it is not a member, -2 when there is no such set."""
        return int(lib.bhvd_process_set_rank(self._pointer, process_set))

    def process_set_hosts(self, process_set: int) -> int:
        """The number of hosts that its ranks are on, -1 when there is no such set or this rank is not a member."""
        return int(lib.bhvd_process_set_hosts(self._pointer, process_set))

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
