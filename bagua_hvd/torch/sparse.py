"""Sums sparse COO tensors by gathering their entries: the sum has the entries of every rank."""
import torch

from bagua_hvd.collectives import rules
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.torch.frontend import frontend


def _check_equal(shapes):
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise HorovodInternalError(f"Mismatched shapes of sparse tensors: {shapes[0]} on rank 0, but {shape} on "
                                       f"rank {rank} of the process set. The same shape is needed on all ranks.")


class SparseSum:
    """The sum of the ranks' tensors, or their mean, in flight: the constructor posts the gathering. Collective.

    Args:
        tensor: sparse COO, same shape on all ranks, any number of entries. blocking: wait() follows immediately.
    Attributes:
        operation: the Operation that wait() waits for.
        compares_shapes: whether wait() does.
    """

    compares_shapes = True

    def __init__(self, tensor: torch.Tensor, name: str | None, process_set: ProcessSet, average: bool,
                 blocking: bool = False) -> None:
        # One row for each entry, as allgather concatenates them; and the shape as a row, unless it is known.
        rows = [tensor._indices().t().contiguous(), tensor._values().contiguous()]
        if self.compares_shapes:
            rows.append(tensor._indices().new_tensor([tensor.shape]))
        self._shape = tensor.shape
        self._divisor = process_set.size() if average else 1
        self._gathered = rules.grouped_allgather(frontend, rows, name, process_set, blocking)
        self.operation = self._gathered.operation

    def wait(self) -> torch.Tensor:
        """Blocks; returns the sum, not coalesced. HorovodInternalError: shapes differ, or a rank was lost."""
        indices, values, *shapes = self._gathered.wait()
        if shapes:
            _check_equal([tuple(shape) for shape in shapes[0].tolist()])
        values = values / self._divisor if self._divisor > 1 else values
        return torch.sparse_coo_tensor(indices.t(), values, self._shape, check_invariants=False)

    @torch.no_grad()
    def write(self, tensor: torch.Tensor) -> None:
        """Puts the sum into the tensor, coalesced; see wait()."""
        tensor.copy_(self.wait().coalesce())    # not tensor.detach(): that is another tensor with the same entries
