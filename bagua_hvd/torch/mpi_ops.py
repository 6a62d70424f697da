"""The collectives over torch tensors, in all of Horovod's variants. The rules are in collectives/rules.py.

A blocking call makes a node of torch/autograd.py's only when a gradient may be requested.
"""
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch.autograd.graph import increment_version

from bagua_hvd.collectives import rules
from bagua_hvd.collectives.compression import Compressor
from bagua_hvd.collectives.rules import handle_average_backwards_compatibility, poll, synchronize  # noqa: F401
from bagua_hvd.core.util import doc_from
from bagua_hvd.job import basics
from bagua_hvd.job.basics import *  # noqa: F403  (of this module, too)
from bagua_hvd.job.basics import Adasum, Average, Max, Min, Product, Sum, is_homogeneous  # noqa: F401
from bagua_hvd.job.process_sets import ProcessSet, global_process_set
from bagua_hvd.torch.autograd import (
    HorovodAllgather,
    HorovodAllreduce,
    HorovodAlltoall,
    HorovodBroadcast,
    HorovodGroupedAllgather,
    HorovodGroupedAllreduce,
    HorovodGroupedReducescatter,
    HorovodReducescatter,
)
from bagua_hvd.torch.compiled import eager
from bagua_hvd.torch.compression import Compression
from bagua_hvd.torch.frontend import frontend
from bagua_hvd.torch.sparse import SparseSum

_basics = basics
_resolve = handle_average_backwards_compatibility
_ASYNC = "Asynchronous and not differentiable: returns a handle for poll() and synchronize()."
_IN_PLACE = "In place: the result overwrites the tensor, which is returned."
_ASYNC_IN_PLACE = "Asynchronous and in place: returns a handle for poll() and synchronize()."
_COMPRESSION = "Compression.none, Compression.fp16 or your own: applied before, undone after."


def _differentiable(function, tensors, *arguments):
    """The result of function.apply(), or where no gradient may be requested of its forward() alone."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return function.apply(*arguments)
    return function.forward(SimpleNamespace(), *arguments)


def _in_place(pending):
    """Returns the operation, and tells autograd, which may have kept the old values, that they are overwritten."""
    for tensor in pending.output if type(pending.output) is tuple else (pending.output,):
        try:
            increment_version(tensor)
        except RuntimeError:        # PyTorch's earlier versions: a tensor made in inference mode has no version
            pass
    return pending


# ---------------------------------------------------------------------------------------------------- allreduce ----


@eager
@doc_from(rules.allreduce, "Differentiable.", compression=_COMPRESSION)
def allreduce(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
              compression: type[Compressor] = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    op = _resolve(op, average)
    if compression is Compression.none and not (tensor.requires_grad and torch.is_grad_enabled()):
        return rules.allreduce(
            frontend, tensor, False, name, op, prescale_factor, postscale_factor, process_set, blocking=True
        ).wait()
    compressed, context = compression.compress(tensor)
    reduced = HorovodAllreduce.apply(compressed, None, name, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(reduced, context)


@eager
@doc_from(rules.allreduce, _ASYNC)
def allreduce_async(tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
                    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                    process_set: ProcessSet = global_process_set) -> int:
    return rules.allreduce(
        frontend, tensor, False, name, _resolve(op, average), prescale_factor, postscale_factor, process_set
    ).handle()


@eager
@doc_from(rules.allreduce, _IN_PLACE)
def allreduce_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
               prescale_factor: float = 1.0, postscale_factor: float = 1.0,
               process_set: ProcessSet = global_process_set) -> torch.Tensor:
    return _in_place(rules.allreduce(
        frontend, tensor, True, name, _resolve(op, average), prescale_factor, postscale_factor, process_set,
        blocking=True,
    )).wait()


@eager
@doc_from(rules.allreduce, _ASYNC_IN_PLACE)
def allreduce_async_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
                     prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                     process_set: ProcessSet = global_process_set) -> int:
    return _in_place(rules.allreduce(
        frontend, tensor, True, name, _resolve(op, average), prescale_factor, postscale_factor, process_set
    )).handle()


@eager
@doc_from(rules.grouped_allreduce, "Differentiable. Returns a list.", compression=_COMPRESSION)
def grouped_allreduce(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                      compression: type[Compressor] = Compression.none, op: int | None = None,
                      prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    op = _resolve(op, average)
    pairs = [compression.compress(tensor) for tensor in rules.listed(tensors)]
    compressed = [tensor for tensor, _ in pairs]
    reduced = _differentiable(HorovodGroupedAllreduce, compressed, None, name, op, prescale_factor, postscale_factor,
                              process_set, *compressed)
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


@eager
@doc_from(rules.grouped_allreduce, _ASYNC)
def grouped_allreduce_async(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                            op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> int:
    return rules.grouped_allreduce(
        frontend, tensors, False, name, _resolve(op, average), prescale_factor, postscale_factor, process_set
    ).handle()


@eager
@doc_from(rules.grouped_allreduce, "In place: the results overwrite the tensors, which are returned as a tuple.")
def grouped_allreduce_(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                       op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                       process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    return _in_place(rules.grouped_allreduce(
        frontend, tensors, True, name, _resolve(op, average), prescale_factor, postscale_factor, process_set,
        blocking=True,
    )).wait()


@eager
@doc_from(rules.grouped_allreduce, _ASYNC_IN_PLACE)
def grouped_allreduce_async_(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                             op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = global_process_set) -> int:
    return _in_place(rules.grouped_allreduce(
        frontend, tensors, True, name, _resolve(op, average), prescale_factor, postscale_factor, process_set
    )).handle()


@eager
def sparse_allreduce_async(tensor: torch.Tensor, name: str | None, op: int | None,
                           process_set: ProcessSet = global_process_set) -> Callable[[], torch.Tensor]:
    """Reduces a sparse COO tensor by gathering its indices and values; duplicates stay uncoalesced.

    Args:
        tensor: sparse COO, same shape on all ranks, any number of entries.
        name: ranks match the gathering by it; None: by the order of unnamed operations.
        op: Average (the values are divided by the size of the set) or Sum. process_set: the ranks taking part.
    Returns:
        A callable that waits and returns the sparse tensor.
    Raises:
        ValueError: the tensor is not sparse, or another op. HorovodInternalError, by the callable: shapes differ.
    """
    if not tensor.is_sparse:
        raise ValueError(f"sparse_allreduce_async takes a sparse COO tensor, not {frontend.type_name(tensor)}.")
    if op not in (Average, Sum):
        raise ValueError("sparse_allreduce_async supports Average and Sum only.")
    return SparseSum(tensor, name, process_set, op == Average).wait


# ---------------------------------------------------------------------------------------------------- allgather ----


@eager
@doc_from(rules.allgather, "Differentiable.")
def allgather(tensor: torch.Tensor, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> torch.Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        return HorovodAllgather.apply(tensor, name, process_set)
    return rules.allgather(frontend, tensor, name, process_set, blocking=True).wait()


@eager
@doc_from(rules.allgather, _ASYNC)
def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    return rules.allgather(frontend, tensor, name, process_set).handle()


@eager
@doc_from(rules.grouped_allgather, "Differentiable.")
def grouped_allgather(tensors: Sequence[torch.Tensor], name: str | None = None,
                      process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    tensors = rules.listed(tensors)
    return _differentiable(HorovodGroupedAllgather, tensors, name, process_set, *tensors)


@eager
@doc_from(rules.grouped_allgather, _ASYNC)
def grouped_allgather_async(tensors: Sequence[torch.Tensor], name: str | None = None,
                            process_set: ProcessSet = global_process_set) -> int:
    return rules.grouped_allgather(frontend, tensors, name, process_set).handle()


# ---------------------------------------------------------------------------------------------------- broadcast ----


@eager
@doc_from(rules.broadcast, "Differentiable.")
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> torch.Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        return HorovodBroadcast.apply(tensor, root_rank, name, process_set)
    return rules.broadcast(frontend, tensor, root_rank, False, name, process_set, blocking=True).wait()


@eager
@doc_from(rules.broadcast, _ASYNC)
def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> int:
    return rules.broadcast(frontend, tensor, root_rank, False, name, process_set).handle()


@eager
@doc_from(rules.broadcast, _IN_PLACE)
def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> torch.Tensor:
    return _in_place(rules.broadcast(frontend, tensor, root_rank, True, name, process_set, blocking=True)).wait()


@eager
@doc_from(rules.broadcast, _ASYNC_IN_PLACE)
def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> int:
    return _in_place(rules.broadcast(frontend, tensor, root_rank, True, name, process_set)).handle()


# ----------------------------------------------------------------------------------------------------- alltoall ----


@eager
@doc_from(rules.alltoall, "Differentiable.")
def alltoall(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None = None, name: str | None = None,
             process_set: ProcessSet = global_process_set) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if tensor.requires_grad and torch.is_grad_enabled():
        pair = HorovodAlltoall.apply(tensor, splits, name, process_set)
    else:
        pair = rules.alltoall(frontend, tensor, splits, name, process_set, blocking=True,
                                    wants_received=splits is not None).wait()
    return pair[0] if splits is None else pair


@eager
@doc_from(rules.alltoall, _ASYNC)
def alltoall_async(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None = None, name: str | None = None,
                   process_set: ProcessSet = global_process_set) -> int:
    return rules.alltoall(frontend, tensor, splits, name, process_set).handle()


# ------------------------------------------------------------------------------------------------ reducescatter ----


@eager
@doc_from(rules.reducescatter, "Differentiable.", compression=_COMPRESSION)
def reducescatter(tensor: torch.Tensor, name: str | None = None, compression: type[Compressor] = Compression.none,
                  op: int | None = Average, process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> torch.Tensor:
    compressed, context = compression.compress(tensor)
    if compressed.requires_grad and torch.is_grad_enabled():
        reduced = HorovodReducescatter.apply(compressed, name, op, process_set, prescale_factor, postscale_factor)
    else:
        reduced = rules.reducescatter(
            frontend, compressed, name, op, process_set, prescale_factor, postscale_factor, blocking=True
        ).wait()
    return compression.decompress(reduced, context)


@eager
@doc_from(rules.reducescatter, _ASYNC)
def reducescatter_async(tensor: torch.Tensor, name: str | None = None, op: int | None = Average,
                        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                        postscale_factor: float = 1.0) -> int:
    return rules.reducescatter(
        frontend, tensor, name, op, process_set, prescale_factor, postscale_factor
    ).handle()


@eager
@doc_from(rules.grouped_reducescatter, "Differentiable. Returns a list.", compression=_COMPRESSION)
def grouped_reducescatter(tensors: Sequence[torch.Tensor], name: str | None = None,
                          compression: type[Compressor] = Compression.none, op: int | None = Average,
                          process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0) -> list[torch.Tensor]:
    pairs = [compression.compress(tensor) for tensor in rules.listed(tensors)]
    compressed = [tensor for tensor, _ in pairs]
    reduced = _differentiable(HorovodGroupedReducescatter, compressed, name, op, process_set, prescale_factor,
                              postscale_factor, *compressed)
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


@eager
@doc_from(rules.grouped_reducescatter, _ASYNC)
def grouped_reducescatter_async(tensors: Sequence[torch.Tensor], name: str | None = None, op: int | None = Average,
                                process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                                postscale_factor: float = 1.0) -> int:
    return rules.grouped_reducescatter(
        frontend, tensors, name, op, process_set, prescale_factor, postscale_factor
    ).handle()


# ---------------------------------------------------------------------------------------------- join and barrier ----


@eager
@doc_from(rules.join, "`device` is unused, for compatibility with Horovod, which keeps this rank's zeros there.")
def join(device: int = -1) -> int:
    if isinstance(device, ProcessSet):
        raise TypeError("join() takes no process set: it is of all ranks of the job, and `device` is ignored")
    return rules.join().wait()


@eager
@doc_from(rules.barrier)
def barrier(process_set: ProcessSet = global_process_set) -> None:
    rules.barrier(process_set).wait()
