"""The blocking collectives as differentiable functions. Their gradients are collectives too, and differentiable again.

When no gradient can be requested, grouped calls of torch/mpi_ops.py run forward() alone: its ctx has attributes only.
"""
from typing import Any

import torch

from bagua_hvd.collectives import rules
from bagua_hvd.collectives.rules import handle_average_backwards_compatibility
from bagua_hvd.job.basics import Average, Sum, rank
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.torch.frontend import frontend


def _dense(gradient):
    """The gradient as collectives take it."""
    return gradient.resolve_conj().resolve_neg().contiguous()


def _averaged(gradients, process_set):
    """The averages over the ranks; complex numbers are sent as pairs, since allreduce takes none."""
    sent = [torch.view_as_real(dense) if dense.is_complex() else dense for dense in map(_dense, gradients)]
    reduced = HorovodGroupedAllreduce.apply(None, None, Average, 1.0, 1.0, process_set, *sent)
    return [torch.view_as_complex(average) if gradient.is_complex() else average
            for average, gradient in zip(reduced, gradients, strict=True)]


class HorovodAllreduce(torch.autograd.Function):
    """allreduce; its gradient is the allreduce of the gradient with the same op and factors."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, average: Any, name: str | None, op: int, prescale_factor: float,
                postscale_factor: float, process_set: ProcessSet) -> Any:
        op = handle_average_backwards_compatibility(op, average)
        ctx.arguments = arguments = op, prescale_factor, postscale_factor, process_set
        return rules.allreduce(frontend, tensor, False, name, *arguments, blocking=True).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        reduced = HorovodAllreduce.apply(_dense(gradient), None, None, *ctx.arguments)
        return reduced, None, None, None, None, None, None


class HorovodGroupedAllreduce(torch.autograd.Function):
    """grouped_allreduce; its gradient is the grouped allreduce of the gradients with the same op and factors."""

    @staticmethod
    def forward(ctx: Any, average: Any, name: str | None, op: int, prescale_factor: float, postscale_factor: float,
                process_set: ProcessSet, *tensors: Any) -> Any:
        op = handle_average_backwards_compatibility(op, average)
        ctx.arguments = arguments = op, prescale_factor, postscale_factor, process_set
        return rules.grouped_allreduce(frontend, tensors, False, name, *arguments, blocking=True).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reduced = HorovodGroupedAllreduce.apply(None, None, *ctx.arguments, *map(_dense, gradients))
        return None, None, None, None, None, None, *reduced


def _own_slices(gradients, rows, process_set):
    """This rank's slices of the averages of gradients that cover all ranks' rows. rows: this rank's, of each."""
    reduced, position = _averaged(gradients, process_set), process_set.rank()
    by_rank = HorovodAllgather.apply(torch.tensor([rows]), None, process_set)
    return [average.narrow(0, int(counts[:position].sum()), int(counts[position]))
            for average, counts in zip(reduced, by_rank.t(), strict=True)]


class HorovodAllgather(torch.autograd.Function):
    """allgather; its gradient is this rank's slice of the averaged gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> Any:
        ctx.process_set = process_set
        ctx.rows = tensor.shape[0] if tensor.dim() else 1
        return rules.allgather(frontend, tensor, name, process_set, blocking=True).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return *_own_slices([gradient], [ctx.rows], ctx.process_set), None, None


class HorovodGroupedAllgather(torch.autograd.Function):
    """grouped_allgather; its gradients are this rank's slices of the averaged gradients; integers have none."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Any) -> Any:
        ctx.process_set = process_set
        ctx.rows = [tensor.shape[0] if tensor.dim() else 1 for tensor in tensors]
        return rules.grouped_allgather(frontend, tensors, name, process_set, blocking=True).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        members = [i for i, gradient in enumerate(gradients) if gradient.is_floating_point() or gradient.is_complex()]
        own = _own_slices([gradients[i] for i in members], [ctx.rows[i] for i in members], ctx.process_set)
        slices = dict(zip(members, own, strict=True))
        return None, None, *map(slices.get, range(len(gradients)))


class HorovodBroadcast(torch.autograd.Function):
    """broadcast; its gradient is the averaged gradient on the root and zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank = root_rank
        ctx.process_set = process_set
        return rules.broadcast(frontend, tensor, root_rank, False, name, process_set, blocking=True).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        reduced = _averaged([gradient], ctx.process_set)[0]
        if rank() != ctx.root_rank:
            reduced = torch.zeros_like(reduced)
        return reduced, None, None, None


class HorovodAlltoall(torch.autograd.Function):
    """alltoall, which always returns the pair; its gradient is the alltoall of the gradient by the received splits."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        output, received_splits = rules.alltoall(frontend, tensor, splits, name, process_set, blocking=True).wait()
        ctx.rows = tensor.shape[0]
        ctx.process_set = process_set
        ctx.received_splits = received_splits
        ctx.mark_non_differentiable(received_splits)
        return output, received_splits

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        returned, _ = HorovodAlltoall.apply(_dense(gradient), ctx.received_splits, None, ctx.process_set)
        dropped = ctx.rows - returned.shape[0]
        if dropped:     # rows past the sum of the splits were not sent
            returned = torch.cat([returned, returned.new_zeros((dropped, *returned.shape[1:]))])
        return returned, None, None, None


def _scatter_factor(ctx):
    """The factor of the gathered gradient, by Horovod's convention: Sum multiplies by the size, Average does not."""
    op, process_set, prescale_factor, postscale_factor = ctx.arguments
    return prescale_factor * postscale_factor * (process_set.size() if op == Sum else 1)


class HorovodReducescatter(torch.autograd.Function):
    """reducescatter; its gradient is the allgather of the gradient, times the size for Sum, times the factors."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet,
                prescale_factor: float, postscale_factor: float) -> Any:
        ctx.arguments = arguments = op, process_set, prescale_factor, postscale_factor
        return rules.reducescatter(frontend, tensor, name, *arguments, blocking=True).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gathered = HorovodAllgather.apply(_dense(gradient), None, ctx.arguments[1])
        return gathered * _scatter_factor(ctx), None, None, None, None, None


class HorovodGroupedReducescatter(torch.autograd.Function):
    """grouped_reducescatter; its gradients are like those of reducescatter."""

    @staticmethod
    def forward(ctx: Any, name: str | None, op: int, process_set: ProcessSet, prescale_factor: float,
                postscale_factor: float, *tensors: Any) -> Any:
        ctx.arguments = arguments = op, process_set, prescale_factor, postscale_factor
        return rules.grouped_reducescatter(frontend, tensors, name, *arguments, blocking=True).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gathered = HorovodGroupedAllgather.apply(None, ctx.arguments[1], *map(_dense, gradients))
        factor = _scatter_factor(ctx)
        return None, None, None, None, None, *(tensor * factor for tensor in gathered)
