"""DistributedOptimizer with op=Adasum: combines the optimizers' updates instead of the gradients.

    delta_i = step(x, g_i) - x          every rank steps locally, from the same parameters
    x      <- x + Adasum_i(delta_i)     for each parameter by itself

Source: Maleki et al., Scaling Distributed Training with Adaptive Summation, arXiv:2006.02924.
"""
from collections.abc import Callable
from typing import Any

import torch

from bagua_hvd.collectives.objects import extremes
from bagua_hvd.job.basics import Adasum
from bagua_hvd.job.process_sets import global_process_set
from bagua_hvd.reduction.agreement import optimizer_number
from bagua_hvd.reduction.weight import check_weighable
from bagua_hvd.torch.compiled import eager
from bagua_hvd.torch.mpi_ops import grouped_allreduce_
from bagua_hvd.torch.source import make_overflow, overflow
from bagua_hvd.torch.wrapping import Wrapped


class DistributedAdasum(Wrapped):
    """The mixin that DistributedOptimizer(op=Adasum) puts before the class of the given optimizer."""

    gradient_predivide_factor = 1.0
    sparse_as_dense = False
    process_set = global_process_set

    def __init__(self, optimizer: torch.optim.Optimizer, named: Any, compression: Any,
                 backward_passes_per_step: Any) -> None:
        super().__init__(optimizer, named)
        self.compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self.op = Adasum
        self.renumber(optimizer_number())

    def renumber(self, number: int | None) -> None:
        """Changes the number by which ranks match its operations."""
        self.number = number

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Has no effect: gradients accumulate until step() is called."""
        self.backward_passes_per_step = passes

    def set_weight(self, weight: float) -> None:
        """Raises ValueError: steps are combined, and nothing is averaged."""
        check_weighable(None)

    @eager
    def synchronize(self) -> None:
        """Does nothing: communication happens in step()."""

    def skip_synchronize(self) -> Any:
        """Raises AssertionError: there is no synchronization to skip."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def _complete(self, agree):
        parameters = [p for group in self.__dict__["param_groups"] for p in group["params"]]
        if agree and extremes([int(overflow(parameters))], f"adasum.{self.number}.overflow", self.process_set)[0][0]:
            make_overflow(parameters)

    @eager
    def step(self, closure: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """Steps as the wrapped class does, and combines the parameter updates across the ranks.

        Raises:
            HorovodInternalError: ranks disagreed, or one was lost; the parameters are as before the step.
        """
        self._count_step()
        if closure is not None:
            kwargs["closure"] = closure
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        with torch.no_grad():
            before = [p.detach().clone(memory_format=torch.contiguous_format) for p in parameters]
        result = super().step(**kwargs)
        with torch.no_grad():
            deltas = [p.detach().contiguous() - start for p, start in zip(parameters, before, strict=True)]
            compressed = [self.compression.compress(delta) for delta in deltas]
            try:
                if compressed:
                    grouped_allreduce_([tensor for tensor, _ in compressed], op=Adasum, name=f"adasum.{self.number}")
            except BaseException:
                for p, start in zip(parameters, before, strict=True):
                    p.copy_(start)
                raise
            for p, start, (tensor, context) in zip(parameters, before, compressed, strict=True):
                p.copy_(start + self.compression.decompress(tensor, context))
        return result

    step.hooked = True      # torch.optim reads it
