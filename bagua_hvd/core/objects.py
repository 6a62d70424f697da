"""Broadcasts and gathers pickled Python objects. No framework's tensors are involved.

cloudpickle can also send lambdas and classes of __main__. Ranks of one job trust each other: they unpickle data from
other ranks, over connections that have been authenticated with the job's secret.
"""
import io
import struct
from typing import Any

import cloudpickle

from bagua_hvd.core import native, vectors
from bagua_hvd.core.exceptions import HorovodInternalError

_SIZE = struct.Struct("=q")
# All ranks must broadcast equally many bytes. The first broadcast has a fixed size; most objects need no second one.
_FIRST_BYTES = 512
_ROOM = _FIRST_BYTES - _SIZE.size


class _Unserializable:
    """Sent in place of an object that its rank cannot serialize, for which the others would wait."""

    def __init__(self, error: Exception) -> None:
        self.reason = f"{type(error).__name__}: {error}"[:300]

    def raise_on_others(self, rank: int, where: str = "") -> None:
        raise HorovodInternalError(f"rank {rank}{where} could not serialize its object: {self.reason}")


def _dumped(obj):
    """The pickled object, or the pickled reason; and the error, or None."""
    try:
        return cloudpickle.dumps(obj), None
    except Exception as error:
        return cloudpickle.dumps(_Unserializable(error)), error


def broadcast_object(context: Any, obj: Any, root_rank: int, is_root: Any, name: str, process_set: Any = 0) -> Any:
    """Returns `obj` itself on the root, a copy of it elsewhere.

    Args:
        context: native Context. root_rank: global rank. is_root: whether this rank is it. process_set: native id.
        name: the same on all ranks; `<name>.sz` carries a small object, and `<name>.t` a larger one after it.
    Raises:
        HorovodInternalError: the root could not serialize the object; it raises its own error.
    """
    dumped, error = _dumped(obj) if is_root else (b"", None)
    data = bytearray(dumped)
    first = bytearray(_SIZE.pack(len(data)) + data[:_ROOM].ljust(_ROOM))
    _broadcast(context, first, root_rank, f"broadcast.{name}.sz", process_set)
    size, = _SIZE.unpack_from(first)
    if not is_root:
        data = first[_SIZE.size:] if size <= _ROOM else bytearray(size)     # loads() ignores what follows the object
    if size > _ROOM:
        _broadcast(context, data, root_rank, f"broadcast.{name}.t", process_set)
    if error is not None:
        raise error
    received = obj if is_root else cloudpickle.loads(data)
    if isinstance(received, _Unserializable):
        received.raise_on_others(root_rank)
    return received


def _broadcast(context, data, root_rank, name, process_set):
    context.post(native.BROADCAST, name, (vectors.bytes_view(data),), process_set=process_set, root_rank=root_rank,
                 blocking=True).wait()


def allgather_object(context: Any, obj: Any, name: str, process_set: Any = 0) -> Any:
    """Returns the ranks' objects as a list in rank order; see broadcast_object for the arguments and errors."""
    data, error = _dumped(obj)
    operation = context.post(native.ALLGATHER, f"allgather.{name}.t",
                             (vectors.gathered_view(data),), process_set=process_set, blocking=True)
    operation.wait()
    nbytes, _, owner = operation.result(0)
    everything = io.BytesIO(native.buffer(owner, nbytes))
    objects = []
    while everything.tell() < nbytes:       # each pickle marks its own end
        objects.append(cloudpickle.load(everything))
    if error is not None:
        raise error
    for rank, received in enumerate(objects):
        if isinstance(received, _Unserializable):
            received.raise_on_others(rank, " of the process set" if process_set else "")
    return objects
