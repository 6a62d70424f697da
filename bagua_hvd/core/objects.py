"""Python objects between ranks: pickled, their sizes first, then their bytes. No framework's tensors are involved.

cloudpickle, so that lambdas and classes of __main__ travel. Ranks of one job trust each other: they unpickle what the
others send, over connections that have proved to know the job's secret.
"""
import struct
from typing import Any

import cloudpickle

from bagua_hvd.core import native, vectors

_SIZE = struct.Struct("=q")


def broadcast_object(context: Any, obj: Any, root_rank: int, is_root: Any, name: str, process_set: Any = 0) -> Any:
    """`obj` itself on the root, its copy elsewhere.

    Args:
        context: native Context. root_rank: global rank. is_root: whether this rank is it. process_set: native id.
        name: the same on all ranks; two operations carry it, `<name>.sz` and `<name>.t`.
    """
    data = bytearray(cloudpickle.dumps(obj) if is_root else b"")
    size = bytearray(_SIZE.pack(len(data)))
    _broadcast(context, size, root_rank, f"broadcast.{name}.sz", process_set)
    if not is_root:
        data = bytearray(_SIZE.unpack(size)[0])
    _broadcast(context, data, root_rank, f"broadcast.{name}.t", process_set)
    return obj if is_root else cloudpickle.loads(data)


def _broadcast(context, data, root_rank, name, process_set):
    context.post(native.BROADCAST, name, (vectors.bytes_view(data),), process_set=process_set, root_rank=root_rank,
                 blocking=True).wait()


def allgather_object(context: Any, obj: Any, name: str, process_set: Any = 0) -> Any:
    """The ranks' objects as a list in rank order; see broadcast_object for the arguments."""
    data = cloudpickle.dumps(obj)
    sizes = _SIZE.iter_unpack(_allgather(context, _SIZE.pack(len(data)), f"allgather.{name}.sz", process_set))
    everything = _allgather(context, data, f"allgather.{name}.t", process_set)
    objects, offset = [], 0
    for (size,) in sizes:
        objects.append(cloudpickle.loads(everything[offset:offset + size]))
        offset += size
    return objects


def _allgather(context, data, name, process_set):
    operation = context.post(native.ALLGATHER, name, (vectors.gathered_view(data),), process_set=process_set,
                             blocking=True)
    operation.wait()
    nbytes, _, owner = operation.result(0)
    return bytes(native.buffer(owner, nbytes))
