"""Sums sparse COO tensors by gathering their entries: the sum has the entries of every rank."""
import torch


def rows_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values with one row for each entry, as allgather concatenates them; contiguous."""
    return tensor._indices().t().contiguous(), tensor._values().contiguous()


def sum_of(gathered: tuple[torch.Tensor, torch.Tensor], shape: torch.Size, divisor: int) -> torch.Tensor:
    """The sum / divisor, not coalesced, of the rows_of() all ranks."""
    indices, values = gathered
    return torch.sparse_coo_tensor(indices.t(), values / divisor if divisor > 1 else values, shape,
                                   check_invariants=False)
