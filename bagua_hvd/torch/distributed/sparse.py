"""Allreduce of sparse COO tensors, by gathering their entries."""
from typing import Any

import torch
from torch.distributed import ReduceOp

from bagua_hvd.collectives.rules import results
from bagua_hvd.core import native
from bagua_hvd.torch.distributed.tensors import kind_of
from bagua_hvd.torch.frontend import frontend
from bagua_hvd.torch.sparse import check_shapes, rows_of, shape_row, sum_of


def allreduce(group: Any, tensor: torch.Tensor, opts: Any) -> Any:
    """The Work of a sum or mean, in place; the result is coalesced.

    Raises:
        ValueError: any other reduction.
    """
    kind = kind_of(opts.reduceOp)
    if kind not in (ReduceOp.RedOpType.SUM, ReduceOp.RedOpType.AVG):
        raise ValueError(f"sparse tensors are reduced by SUM and AVG only, not {opts.reduceOp}")
    name, what = group._begin("all_reduce of a sparse tensor")
    operation, finish = begin(tensor, lambda views: group._post(native.ALLGATHER, name, views),
                              group.size() if kind == ReduceOp.RedOpType.AVG else 1)
    return group._work(operation, [tensor], what, opts, finish)


def begin(tensor: torch.Tensor, post: Any, divisor: int) -> Any:
    """Starts to sum a tensor. Returns (operation, function that puts the sum / divisor into the tensor at its end).

    post: function that posts the allgather of views.
    """
    rows = [*rows_of(tensor.detach().coalesce()), shape_row(tensor)]
    views = list(map(frontend.view, rows))
    operation = post(views)

    def finish():
        *gathered, shapes = results(frontend, operation, views, rows)
        check_shapes(shapes)
        total = sum_of(gathered, tensor.shape, divisor).coalesce()
        with torch.no_grad():       # not tensor.detach(): that is another tensor with the same entries
            tensor.copy_(total)

    return operation, finish
