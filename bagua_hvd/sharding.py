"""Compressed reduce-scatter and all-gather, for training with sharded gradients and weights.

    reducescatter   rank k: s[k] = sum_i D(Q(v_i[k]))       one alltoall of codes, summed by the receiver
    allgather       all:    (D(Q(v_0)), ..., D(Q(v_n-1)))   one allgather of codes; a rank also decodes its own

v_i[k] is the k-th of n equal parts of rank i's values. Values are encoded once, so the error is that of one Q. With
4-bit blocks this is the reduce-scatter of qgZ (its second hop, within hosts, is left to the network), and with 8-bit
blocks the all-gather of qwZ.

Wire: N (n-1)/n codes, N/n (n-1) codes of rank i's N/n values; each begins with the codec's name and parameter.
Source: Wang et al., ZeRO++, arXiv:2306.10209.
"""
import struct
from typing import Any

import numpy as np

from bagua_hvd.codecs import Codec
from bagua_hvd.collectives.arguments import check_name
from bagua_hvd.core import native, vectors
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.operations import Posted
from bagua_hvd.job.process_sets import ProcessSet, context_and_id

_CODEC = struct.Struct("=16sd")


class Codes:
    """Codes in flight to this rank: the result of reducescatter() and of allgather().

    Args:
        count: values in one code. sums: whether wait() sums the codes of the ranks, or concatenates them.
    """

    def __init__(self, operation: Posted, count: int, codec: Codec, dtype: Any, sums: bool) -> None:
        self._operation = operation
        self._count = count
        self._codec = codec
        self._dtype = dtype
        self._sums = sums
        self._received: list[np.ndarray] | None = None

    def done(self) -> bool:
        """Whether wait() would not block."""
        return self._operation.done()

    def wait(self, out: np.ndarray | None = None) -> np.ndarray:
        """Blocks; returns this rank's part of the sum, float32, or all ranks' values in rank order; in `out` if given.

        Raises:
            ValueError: the result does not fit `out`. HorovodInternalError: codecs differ, or a rank was lost.
        """
        codes = self._arrived()
        shape = (self._count if self._sums else len(codes) * self._count,)
        if out is None:
            out = np.empty(shape, np.float32 if self._sums else self._dtype)
        if out.shape != shape or not out.flags.c_contiguous:
            raise ValueError(f"out: expected a contiguous array of shape {shape}, but its shape is {out.shape} and its "
                             f"strides are {out.strides}")
        if self._sums:
            out[:] = 0
            for code in codes:
                self._codec.decode_add(out, code, self._dtype)
        else:
            for part, code in zip(out.reshape(len(codes), self._count), codes, strict=True):
                part[:] = self._codec.decode(code, self._dtype, self._count)
        return out

    def _arrived(self) -> list[np.ndarray]:
        """Blocks; returns the received codes of each rank."""
        if self._received is None:
            self._operation.wait()
            nbytes, size, owner = self._operation.result(0)
            rows: np.ndarray = np.frombuffer(native.buffer(owner, nbytes), np.uint8).reshape(size, -1)
            for rank, row in enumerate(rows):
                padded, parameter = _CODEC.unpack_from(row)
                name = padded.rstrip(b"\0").decode()
                if (name, parameter) != (self._codec.name, self._codec.parameter):
                    raise HorovodInternalError(
                        f"Mismatched codecs: rank {rank} of the process set has {name} with parameter "
                        f"{parameter:g}, and this rank {self._codec.name} with {self._codec.parameter:g}")
            self._received = [row[_CODEC.size:] for row in rows]
        return self._received


def reducescatter(values: np.ndarray, group: ProcessSet, codec: Codec, name: str, seed: int = 0) -> Codes:
    """Sums the ranks' values, sent as codes; each of the n ranks of `group` receives one n-th of the sum.

    Args:
        values: flat, of a dtype that the codec supports, of the same size on all ranks, a multiple of n. Copied.
        codec: equal on all ranks. name: the same on all ranks, and not used by another operation in flight.
        seed: for a codec that rounds at random; a different one for each call and rank.
    Raises:
        ValueError: the values cannot be split evenly, or the codec does not support them.
    """
    size = group.size()
    if values.ndim != 1 or values.size % size:
        raise ValueError(f"reducescatter: shape {values.shape} is not flat, or not to be shared by {size} ranks evenly")
    parts = values.reshape(size, -1)
    codes: np.ndarray = np.stack([_encoded(codec, part, (seed + place) % 2**64) for place, part in enumerate(parts)])
    return Codes(_post(native.ALLTOALL, codes, group, name), parts.shape[1], codec, values.dtype, sums=True)


def allgather(values: np.ndarray, group: ProcessSet, codec: Codec, name: str, seed: int = 0) -> Codes:
    """Gathers all ranks' values, sent as codes; bit-equal on all ranks. Arguments as for reducescatter().

    Args:
        values: flat, of any size, which is the same on all ranks.
    Raises:
        ValueError: they are not flat, or the codec does not support them.
    """
    if values.ndim != 1:
        raise ValueError(f"allgather: shape {values.shape} is not flat")
    codes = _encoded(codec, values, seed)[None]
    return Codes(_post(native.ALLGATHER, codes, group, name), values.size, codec, values.dtype, sums=False)


def _encoded(codec: Codec, values: np.ndarray, seed: int) -> np.ndarray:
    header: np.ndarray = np.frombuffer(_CODEC.pack(codec.name.encode(), codec.parameter), np.uint8)
    return np.concatenate([header, codec.encode(values, seed)])


def _post(kind: int, codes: np.ndarray, group: ProcessSet, name: str) -> Posted:
    check_name(name)
    view = vectors.array_view(codes)._replace(dst=0)
    context, id = context_and_id(group)
    return context.post(kind, name, [view], process_set=id)
