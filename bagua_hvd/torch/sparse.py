"""Sums sparse COO tensors by gathering their entries: the sum has the entries of every rank."""
from collections.abc import Sequence

import torch

from bagua_hvd.core.exceptions import HorovodInternalError


def rows_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values with one row for each entry, as allgather concatenates them; contiguous."""
    return tensor._indices().t().contiguous(), tensor._values().contiguous()


def shape_row(tensor: torch.Tensor) -> torch.Tensor:
    """The shape as a row to gather beside rows_of(), where nothing has compared the ranks' shapes yet."""
    return tensor._indices().new_tensor([tensor.shape])


def check_shapes(gathered: torch.Tensor) -> None:
    """Raises HorovodInternalError unless the shape_row() is the same on all ranks. All ranks raise it."""
    first, *others = map(tuple, gathered.tolist())
    for rank, shape in enumerate(others, 1):
        if shape != first:
            raise HorovodInternalError(f"Mismatched shapes of sparse tensors: {first} on rank 0, but {shape} on rank "
                                       f"{rank} of the process set. The same shape is needed on all ranks.")


def sum_of(gathered: Sequence[torch.Tensor], shape: torch.Size, divisor: int) -> torch.Tensor:
    """The sum / divisor, not coalesced, of the rows_of() all ranks."""
    indices, values = gathered
    return torch.sparse_coo_tensor(indices.t(), values / divisor if divisor > 1 else values, shape,
                                   check_invariants=False)
