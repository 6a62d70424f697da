"""Broadcasts and gathers pickled Python objects. No framework's tensors are involved.

cloudpickle can also send lambdas and classes of __main__. Ranks of one job trust each other: they unpickle data from
other ranks, over connections that have been authenticated with the job's secret.
"""
import io
import struct
from typing import Any

import cloudpickle

from bagua_hvd.core import native, vectors

_SIZE = struct.Struct("=q")
# All ranks must broadcast equally many bytes. The first broadcast has a fixed size; most objects need no second one.
_FIRST_BYTES = 512
_ROOM = _FIRST_BYTES - _SIZE.size


def broadcast_object(context: Any, obj: Any, root_rank: int, is_root: Any, name: str, process_set: Any = 0) -> Any:
    """Returns `obj` itself on the root, a copy of it elsewhere.

    Args:
        context: native Context. root_rank: global rank. is_root: whether this rank is it. process_set: native id.
        name: the same on all ranks; `<name>.sz` carries a small object, and `<name>.t` a larger one after it.
    """
    data = bytearray(cloudpickle.dumps(obj) if is_root else b"")
    first = bytearray(_SIZE.pack(len(data)) + data[:_ROOM].ljust(_ROOM))
    _broadcast(context, first, root_rank, f"broadcast.{name}.sz", process_set)
    size, = _SIZE.unpack_from(first)
    if not is_root:
        data = first[_SIZE.size:] if size <= _ROOM else bytearray(size)     # loads() ignores what follows the object
    if size > _ROOM:
        _broadcast(context, data, root_rank, f"broadcast.{name}.t", process_set)
    return obj if is_root else cloudpickle.loads(data)


def _broadcast(context, data, root_rank, name, process_set):
    context.post(native.BROADCAST, name, (vectors.bytes_view(data),), process_set=process_set, root_rank=root_rank,
                 blocking=True).wait()


def allgather_object(context: Any, obj: Any, name: str, process_set: Any = 0) -> Any:
    """Returns the ranks' objects as a list in rank order; see broadcast_object for the arguments."""
    operation = context.post(native.ALLGATHER, f"allgather.{name}.t",
                             (vectors.gathered_view(cloudpickle.dumps(obj)),), process_set=process_set, blocking=True)
    operation.wait()
    nbytes, _, owner = operation.result(0)
    everything = io.BytesIO(native.buffer(owner, nbytes))
    objects = []
    while everything.tell() < nbytes:       # each pickle marks its own end
        objects.append(cloudpickle.load(everything))
    return objects
