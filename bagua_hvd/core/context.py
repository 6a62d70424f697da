"""A rank's place in a job: made by init(), with its connections and its progress thread."""
from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.native import CHARS, OK, UINTPTR, call, ffi, fill_error, lib
from bagua_hvd.core.operations import Posting
from bagua_hvd.core.telemetry import Telemetry


class _Gatherer:
    def __init__(self, gather: Callable[[bytes], bytes], secret: bytes) -> None:
        self.gather = gather
        self.secret = secret
        self.failure: BaseException | None = None


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
        return OK
    except BaseException as failure:
        gatherer.failure = failure
        return fill_error(error, lib.BHVD_ERR_SYSTEM, str(failure))


class Context(Posting, Telemetry):
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
        gatherer = _Gatherer(gather, options.secret)
        user = ffi.new_handle(gatherer)
        values = {**vars(options), "user": user, "gather": lib.bhvd_python_gather}
        fields = {}         # keep alive the memory that the core reads
        for name, _ in ffi.typeof("struct bhvd_context_options").fields:
            value = values[name]
            if value is not None:       # else NULL
                fields[name] = ffi.new(CHARS, value.encode()) if isinstance(value, str) else value
        native = ffi.new("struct bhvd_context_options *", fields)
        out = ffi.new("bhvd_context **")
        try:
            call(lib.bhvd_context_create, native, out)
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
        return int(ffi.cast(UINTPTR, self._pointer))

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
