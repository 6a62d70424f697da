"""The only importer of the cffi module: the core's codes by name, its errors as exceptions, tensors as it sees them.

Tensors are passed as address, shape and dtype. Contexts: context.py. Operations: operations.py.
"""
from functools import partial
from typing import Any, NamedTuple, NoReturn

from bagua_hvd.core.exceptions import HorovodInternalError

try:
    from bagua_hvd._native import ffi as ffi
    from bagua_hvd._native import lib as lib
except ImportError as error:
    raise ImportError(
        "the native extension of bagua_hvd is not built: run `pip install .` in the source folder of bagua_hvd "
        f"(for development: `pip install -e .`); a C compiler is needed. The import failed with: {error}"
    ) from error

OK = lib.BHVD_OK
IN_PROGRESS = lib.BHVD_IN_PROGRESS
ERR_ARGUMENT = lib.BHVD_ERR_ARGUMENT
ERR_MISMATCH = lib.BHVD_ERR_MISMATCH
ERR_UNSUPPORTED = lib.BHVD_ERR_UNSUPPORTED
ERR_PEER_LOST = lib.BHVD_ERR_PEER_LOST
ERR_SHUTDOWN = lib.BHVD_ERR_SHUTDOWN
ERR_SYSTEM = lib.BHVD_ERR_SYSTEM

UINT8, INT8, UINT16, INT16 = lib.BHVD_UINT8, lib.BHVD_INT8, lib.BHVD_UINT16, lib.BHVD_INT16
INT32, INT64 = lib.BHVD_INT32, lib.BHVD_INT64
FLOAT16, FLOAT32, FLOAT64 = lib.BHVD_FLOAT16, lib.BHVD_FLOAT32, lib.BHVD_FLOAT64
BOOL, BFLOAT16 = lib.BHVD_BOOL, lib.BHVD_BFLOAT16

OP_AVERAGE, OP_SUM, OP_ADASUM = lib.BHVD_OP_AVERAGE, lib.BHVD_OP_SUM, lib.BHVD_OP_ADASUM
OP_MIN, OP_MAX, OP_PRODUCT = lib.BHVD_OP_MIN, lib.BHVD_OP_MAX, lib.BHVD_OP_PRODUCT

ALLREDUCE, ALLGATHER, BROADCAST = lib.BHVD_ALLREDUCE, lib.BHVD_ALLGATHER, lib.BHVD_BROADCAST
ALLTOALL, REDUCESCATTER = lib.BHVD_ALLTOALL, lib.BHVD_REDUCESCATTER
BARRIER, JOIN = lib.BHVD_BARRIER, lib.BHVD_JOIN
C_LP_S, D_FP_S, D_LP_S = lib.BHVD_C_LP_S, lib.BHVD_D_FP_S, lib.BHVD_D_LP_S
PROCESS_SET_ADD, PROCESS_SET_REMOVE = lib.BHVD_PROCESS_SET_ADD, lib.BHVD_PROCESS_SET_REMOVE

# HorovodInternalError.cause, indexed by the core's number.
CAUSES = (None, "ended", "silent", "left", "failed", "timeout", "protocol")

LOG_STALLED = lib.BHVD_LOG_STALLED

EXCHANGE_SCATTER_GATHER, EXCHANGE_ALLGATHER = lib.BHVD_EXCHANGE_SCATTER_GATHER, lib.BHVD_EXCHANGE_ALLGATHER
TOPOLOGY_SHIFT_ONE, TOPOLOGY_RING = lib.BHVD_TOPOLOGY_SHIFT_ONE, lib.BHVD_TOPOLOGY_RING
TOPOLOGY_EXPONENTIAL, TOPOLOGY_ROUND_ROBIN = lib.BHVD_TOPOLOGY_EXPONENTIAL, lib.BHVD_TOPOLOGY_ROUND_ROBIN

# cffi types, parsed once.
VOID_POINTER = ffi.typeof("void *")
CHARS = ffi.typeof("char[]")
UINTPTR = ffi.typeof("uintptr_t")
NULL = ffi.NULL


class TensorView(NamedTuple):
    """Memory of a tensor. dst: 0 lets the core allocate; equal to src is in place. owner keeps src and dst alive.

    placement: a device.Placement on a GPU, None on the host. dst_on_host: dst is in host memory nevertheless.
    """

    src: int
    dst: int
    shape: tuple[int, ...]
    dtype: int
    owner: object
    placement: Any = None
    dst_on_host: bool = False


# TensorView(*fields) in a third of the time, for small operations.
tensor_view = partial(tuple.__new__, TensorView)


class Failure(NamedTuple):
    """A struct bhvd_error. `rank` and `cause` are those of HorovodInternalError."""

    status: int
    message: str
    rank: int | None = None
    cause: str | None = None


def failure_of(error: Any) -> Failure:
    """The Failure that a native call wrote into a struct bhvd_error."""
    text: bytes = ffi.string(error.message)
    return Failure(error.status, text.decode("utf-8", "replace"),
                   error.rank if error.cause and error.rank >= 0 else None, CAUSES[error.cause])


def raise_failure(failure: Failure) -> NoReturn:
    """Raises a Failure as a Python exception: ValueError for a wrong call, else HorovodInternalError.

    The exception carries the code as `status`, for front ends with exceptions of their own.
    """
    status, message, rank, cause = failure
    error: Any = ValueError(message) if status == ERR_ARGUMENT else HorovodInternalError(message)
    if status != ERR_ARGUMENT:
        error.rank, error.cause = rank, cause
    error.status = status
    raise error


def call(function: Any, *arguments: Any) -> None:
    """Calls a function of the core whose last parameter is a struct bhvd_error. Raises its error: raise_failure()."""
    error = ffi.new("struct bhvd_error *")
    if function(*arguments, error) != OK:
        raise_failure(failure_of(error))


def buffer(owner: Any, nbytes: int) -> Any:
    """The memory of a result as a writable Python buffer, which keeps `owner` alive."""
    return ffi.buffer(owner, nbytes)


def function_address(name: str) -> int:
    """The address of a function of the core, for libraries that call it themselves."""
    return int(ffi.cast(UINTPTR, ffi.addressof(lib, name)))


def fill_error(error: Any, status: int, message: str) -> int:
    """Writes into a struct bhvd_error that native code passed in, without blaming a rank; cuts a long message."""
    error.status, error.cause, error.rank = status, lib.BHVD_CAUSE_NONE, -1
    text = message.encode()[:ffi.sizeof(error.message) - 1]
    ffi.memmove(error.message, text + b"\0", len(text) + 1)
    return status


def dtype_name(dtype: int) -> str:
    name: bytes = ffi.string(lib.bhvd_dtype_name(dtype))
    return name.decode()


def dtype_size(dtype: int) -> int:
    return int(lib.bhvd_dtype_size(dtype))


def chunk_count(count: int, size: int) -> int:
    """Elements of the longest chunk when `count` elements are divided among `size` ranks."""
    return int(lib.bhvd_chunk_count(count, size))
