"""The communication primitives of BAGUA, for an algorithm's `communicate` and for direct use.

Each posts one native operation and returns its Operation without blocking; wait() completes it. The core reads and
overwrites the values, a Bucket or a contiguous NumPy array, in place (or writes to `out`). Do not touch them until the
Operation has ended.

    c_fp_s   centralized, full precision, synchronous: allreduce
    c_lp_s   centralized, low precision, synchronous: alltoall of codes, mean of the own chunk, allgather of its code
    d_fp_s   decentralized, full precision, synchronous: the mean with a peer, or with the neighbours in a ring
    d_lp_s   decentralized, low precision, synchronous: codes to and from the neighbours in a ring

A bucket has a name. An array needs a `name`, the same on all ranks and used by no other operation in flight: ranks
match operations by it. Every wait() raises HorovodInternalError when ranks disagree or one is lost.

The names are those of BAGUA (Gan et al., arXiv:2107.01499).
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from bagua_hvd.codecs import (  # with the primitives that take them
    INTEGERS,
    NUMBERS,
    Codec,
    bfloat16,
    block,
    float8,
    float16,
    float32,
    minmax_uint8,
    rotated,
    sign,
    sign_rms,
    topk,
)
from bagua_hvd.collectives.arguments import check_name
from bagua_hvd.core import native, vectors
from bagua_hvd.core.context import Context
from bagua_hvd.core.native import TensorView
from bagua_hvd.core.operations import Posted
from bagua_hvd.job.process_sets import ProcessSet, context_and_id
from bagua_hvd.training.buckets import Bucket

EXCHANGES = {"scatter_gather": native.EXCHANGE_SCATTER_GATHER, "allgather": native.EXCHANGE_ALLGATHER}
TOPOLOGIES = {"shift_one": native.TOPOLOGY_SHIFT_ONE, "ring": native.TOPOLOGY_RING,
              "exponential": native.TOPOLOGY_EXPONENTIAL, "round_robin": native.TOPOLOGY_ROUND_ROBIN}

__all__ = [
    "Codec", "ErrorState", "Replicas", "bfloat16", "block", "c_fp_s", "c_lp_s", "d_fp_s", "d_lp_s", "float8", "float16",
    "float32", "minmax_uint8", "rotated", "sign", "sign_rms", "topk",
]

_seeds = itertools.count(1)


def _array(name: str) -> Any:
    """A property of a _DeviceState: the array of this name, None if it is not kept."""
    def fetch(self: _DeviceState) -> Any:
        return self._kept[name].fetch() if name in self._kept else None

    def replace(self: _DeviceState, array: np.ndarray) -> None:
        self._kept[name] = vectors.DeviceArray(array)

    return property(fetch, replace)


class _DeviceState:
    """Contiguous float32 NumPy arrays, which GPU operations keep on the GPU: reading an attribute waits for them."""

    def __init__(self, **arrays: np.ndarray | None) -> None:
        self._kept = {name: vectors.DeviceArray(array) for name, array in arrays.items() if array is not None}

    def _pointers(self, *names: str) -> tuple[list[Any], list[Any]]:
        """The host arrays and their copies on a GPU, for Context.post."""
        kept = [self._kept.get(name) for name in names]
        return ([native.ffi.NULL if each is None else each.floats for each in kept],
                [native.ffi.NULL if each is None else each.pointer for each in kept])

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: kept.fetch() for name, kept in self._kept.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank."""
        return {name: array.tobytes() for name, array in self._arrays().items()}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Returns False, and changes nothing, when the state is of another size, such as of other ranks."""
        arrays = self._arrays()
        if arrays.keys() != state.keys() or any(len(state[name]) != array.nbytes for name, array in arrays.items()):
            return False
        for name, array in arrays.items():
            array[:] = np.frombuffer(state[name], array.dtype)
        return True


class ErrorState(_DeviceState):
    """The float32 state of error feedback, zero at first. GPU operations keep it on the GPU: reading waits for them.

    Attributes:
        worker: accumulated encoding errors of this rank's own values; one element for each of the bucket.
        server: accumulated encoding errors of the mean of this rank's chunk; one element for each of the chunk.
            Hierarchical: one for each of the bucket, but a rank uses only its chunks; unused memory costs nothing.
    Raises:
        ValueError: an attribute is set to anything but a contiguous, writable float32 NumPy array.
    """

    worker = _array("worker")
    server = _array("server")

    def __init__(self, count: int, size: int, hierarchical: bool = False) -> None:
        _check("an integer", INTEGERS, count=count, size=size)
        super().__init__(worker=np.zeros(count, np.float32),
                         server=np.zeros(self._server_count(count, size, hierarchical), np.float32))

    def fields(self) -> dict[str, Any]:
        """Arguments of Context.post."""
        (worker, server), (worker_copy, server_copy) = self._pointers("worker", "server")
        return {"worker_residual": worker, "server_residual": server,
                "worker_copy": worker_copy, "server_copy": server_copy}

    @staticmethod
    def _server_count(count: int, size: int, hierarchical: bool) -> int:
        return count if hierarchical else native.chunk_count(count, size)

    def fits(self, count: int, size: int, hierarchical: bool = False) -> bool:
        """Whether it was made for `count` elements over `size` ranks."""
        return [kept.size for kept in self._kept.values()] == [count, self._server_count(count, size, hierarchical)]

    def copy(self) -> ErrorState:
        """A copy; on the GPU if the values are there."""
        other = object.__new__(ErrorState)
        other._kept = {name: kept.copy(np.empty(kept.size, np.float32)) for name, kept in self._kept.items()}
        return other

    def scale(self, factor: float) -> None:
        """Multiplies the errors by `factor`, after the unit of the encoded values has changed."""
        for array in self._arrays().values():
            array *= np.float32(factor)


class Replicas(_DeviceState):
    """The values that a rank and its ring neighbours have sent so far, equal on all ranks that hold a copy.

    A checkpoint must hold the state_dict() of every rank, or all ranks must start equal again.

    Args:
        own, left, right: contiguous float32 NumPy arrays of one element for each value, or None: not kept. Left is the
            rank before this one. They must start equal on their holders: own here, right on the left neighbour, left on
            the right one. GPU operations keep them on the GPU: reading an attribute waits for them.
    Raises:
        ValueError: an array is anything else.
    """

    own = _array("own")
    left = _array("left")
    right = _array("right")

    def __init__(self, own: Any, left: Any, right: Any) -> None:
        super().__init__(own=own, left=left, right=right)

    def fits(self, count: int) -> bool:
        """Whether the kept replicas have `count` elements."""
        return all(kept.size == count for kept in self._kept.values())

    def fields(self, count: int) -> dict[str, Any]:
        """Arguments of Context.post, for values of `count` elements. ValueError: the replicas do not fit."""
        for kept in self._kept.values():
            if kept.size != count:
                raise ValueError(f"a replica is float32{list(kept.array.shape)}, not float32[{count}]")
        arrays, copies = self._pointers("own", "left", "right")
        return {"replicas": arrays, "replica_copies": copies}


def _check(expected: str, types: Any, **given: Any) -> None:
    """Raises TypeError unless each argument is of one of these types."""
    for name, value in given.items():
        if not isinstance(value, types):
            raise TypeError(f"{name}={value!r:.100}: expected {expected}")


_BOOL = (bool, int, np.bool_)


# Of the values of a primitive: name, TensorViews, prescale_factor, postscale_factor.
_Operands = tuple[str, list[TensorView], float, float]


def _operands(values: Any, name: str | None, out: np.ndarray | None) -> _Operands:
    if out is not None:
        _check("a NumPy array, or None", np.ndarray, out=out)
    if name is not None:
        check_name(name, "a primitive")
    if not isinstance(values, Bucket):
        if name is None:
            raise ValueError("an array needs a name, the same on all ranks, by which they match the operation")
        return name, [vectors.array_view(values, out)], 1.0, 1.0
    views = values.views if out is None else vectors.views_into(values.views, out)
    return name or values.name, views, values.prescale_factor, values.postscale_factor


def _count(views: Sequence[TensorView]) -> int:
    return sum(map(vectors.count_of, views))


def _choice(choices: dict[str, int], chosen: str, what: str) -> int:
    if not isinstance(chosen, str) or chosen not in choices:
        raise ValueError(f"{what}={chosen!r}: expected one of {', '.join(choices)}")
    return choices[chosen]


def _codec_fields(codec: Codec, seed: int | None) -> dict[str, Any]:
    if not isinstance(codec, Codec):
        raise TypeError(f"a codec is one of bagua_hvd.codecs, not {codec!r:.100}")
    # Two calls in a process must never draw the same random numbers.
    seed = next(_seeds) if seed is None else seed
    return {"codec": codec.number, "codec_options": codec.fields(seed)}


def c_fp_s(bucket: Any, group: ProcessSet, average: bool = True, prescale_factor: float = 1.0,
           postscale_factor: float = 1.0, out: np.ndarray | None = None,
           name: str | None = None) -> Posted:
    """Sum or mean over the ranks of `group`; bit-equal on all ranks.

    Args:
        bucket: a Bucket or an array; one dtype that allreduce takes; the same layout on all ranks.
        average: False for the sum.
        prescale_factor, postscale_factor: multiply before and after, together with the bucket's own factors.
        out: receives the result: for an array one like it, for a bucket a flat array with the same number and size of
            elements. None: in place.
        name: of an array; for a bucket, replaces its own.
    """
    operands = _operands(bucket, name, out)
    return _reduce(native.ALLREDUCE, operands, *context_and_id(group), average, prescale_factor, postscale_factor)


def c_lp_s(bucket: Any, group: ProcessSet, codec: Codec = minmax_uint8, error: ErrorState | None = None,
           average: bool = True, exchange: str = "scatter_gather", seed: int | None = None,
           prescale_factor: float = 1.0, postscale_factor: float = 1.0, out: np.ndarray | None = None,
           name: str | None = None, hierarchical: bool = False) -> Posted:
    """Sum or mean of the encoded values over the ranks of `group`; bit-equal on all ranks.

    Args:
        bucket: a Bucket or an array, of a dtype that the codec takes; the same layout on all ranks.
        codec: equal on all ranks.
        error: an ErrorState that fits, read and updated; None: no error feedback.
        average: False for the sum.
        exchange: "scatter_gather": every rank averages its chunk, and encodes it again; "allgather": all codes go to
            all ranks, encoded once; less traffic for very small codes (top-k) or few ranks.
        seed: for a codec that rounds at random or rotates, 0 <= seed < 2^64; None: a new one for each call. It is mixed
            with rank and offset (native/kernel/segments.h). Use the same seed on all ranks with rotated(), which then
            needs fewer transforms.
        prescale_factor, postscale_factor, out, name: as for c_fp_s().
        hierarchical: sum in full precision within hosts, codes between them. No effect on one host.
    Raises:
        ValueError: the error state does not fit.
    """
    operands = _operands(bucket, name, out)
    context, id = context_and_id(group)
    _check("a bool", _BOOL, hierarchical=hierarchical)
    if error is not None:
        _check("an ErrorState, or None", ErrorState, error=error)
        count, size = _count(operands[1]), group.size()
        if not error.fits(count, size, hierarchical):
            raise ValueError(f"the error state does not fit {count} elements over {size} ranks, "
                             f"hierarchical={hierarchical}: make a new ErrorState")
    return _reduce(
        native.C_LP_S, operands, context, id, average, prescale_factor, postscale_factor,
        exchange=_choice(EXCHANGES, exchange, "exchange"), hierarchical=hierarchical, owner=error,
        **(error.fields() if error else {}), **_codec_fields(codec, seed),
    )


def _reduce(kind: int, operands: _Operands, context: Context, id: int, average: bool, prescale_factor: float,
            postscale_factor: float, **fields: Any) -> Posted:
    _check("a bool", _BOOL, average=average)
    _check("a number", NUMBERS, prescale_factor=prescale_factor, postscale_factor=postscale_factor)
    name, views, prescale, postscale = operands
    return context.post(
        kind, name, views, process_set=id, op=native.OP_AVERAGE if average else native.OP_SUM,
        prescale_factor=prescale * prescale_factor, postscale_factor=postscale * postscale_factor, **fields,
    )


def d_fp_s(bucket: Any, group: ProcessSet, topology: str = "shift_one", round: int = 0,
           out: np.ndarray | None = None, name: str | None = None, hierarchical: bool = False) -> Posted:
    """The mean of this rank and its peers, which differs between ranks. A bucket's factors do not apply.

    Args:
        bucket: a Bucket or an array, of one floating dtype; the same layout on all ranks.
        topology: "shift_one", "exponential", "round_robin": the mean of two, with another peer in every round
            (native/primitive/peers.h); "ring": the mean of three, with both neighbours; with two ranks the other one
            counts twice.
        round: counts the calls, from 0; equal on all ranks.
        group, out, name: as for c_fp_s().
        hierarchical: hosts are the peers, each with the mean of its ranks, weighted by their number
            (native/primitive/peers.h). Ranks of a host end equal; the mean over all ranks stays. One host: its mean.
    """
    operation_name, views, *_ = _operands(bucket, name, out)
    _check("a bool", _BOOL, hierarchical=hierarchical)
    _check("an integer", INTEGERS, round=round)
    context, id = context_and_id(group)
    return context.post(
        native.D_FP_S, operation_name, views, process_set=id,
        topology=_choice(TOPOLOGIES, topology, "topology"), round=round, hierarchical=hierarchical,
    )


def d_lp_s(values: Any, group: ProcessSet, codec: Codec, replicas: Replicas, seed: int | None = None,
           name: str | None = None, hierarchical: bool = False, before: Sequence[float] = (0, 0, 0),
           after: Sequence[float] = (0, 0, 0, 0)) -> Posted:
    """Sends the encoded values to both neighbours in a ring, and adds each decoded code to its sender's replica.

        v = values + a . (own, left, right)
        own += D(Q(v))      left += D(Q(v_left))      right += D(Q(v_right))
        values = b . (values, own, left, right)                                 where b has weights of replicas

    Args:
        values: a Bucket or an array, of a dtype that the codec takes. The same layout on all ranks.
        replicas: Replicas with the same number of elements. With two ranks, left and right are the same rank; a single
            rank is its own left and right.
        group, codec, seed, name: as for c_lp_s().
        hierarchical: hosts form the ring, each with the mean of its ranks' values; ranks of a host have equal replicas
            and results. A single host is its own left and right. A neighbour with a share s < 1 of this host's number
            of ranks weighs less in the mixes: its replica R is replaced by own + s (R - own), if own is kept.
        before, after: a and b; replicas are mixed in float32. A replica that is not kept has weight 0. For a Weights,
            call written() when the operation has ended.
    Raises:
        ValueError: the replicas do not fit, or an operation that has not ended uses one of them.
    """
    operation_name, views, *_ = _operands(values, name, None)
    _check("a bool", _BOOL, hierarchical=hierarchical)
    _check("Replicas", Replicas, replicas=replicas)
    for what, numbers, count in (("before", before, 3), ("after", after, 4)):
        if len(numbers) != count:
            raise ValueError(f"{what}={numbers!r:.100}: expected {count} numbers")
    context, id = context_and_id(group)
    return context.post(
        native.D_LP_S, operation_name, views, process_set=id, hierarchical=hierarchical, owner=replicas, before=before,
        after=after, **replicas.fields(_count(views)), **_codec_fields(codec, seed),
    )
