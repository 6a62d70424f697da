"""Averages the ranks' models, which decentralized and asynchronous algorithms let differ."""

import torch

from bagua_hvd.job.basics import Average
from bagua_hvd.job.process_sets import ProcessSet, global_process_set
from bagua_hvd.torch.frontend import DTYPES, frontend
from bagua_hvd.torch.mpi_ops import grouped_allreduce


class consensus:
    """Sets the floating-point tensors of a model's state_dict() to their mean over the ranks, at once. Collective.

        hvd.consensus(model)                    # from here on all ranks have the mean

        with hvd.consensus(model):              # for this block only: evaluation, a checkpoint
            evaluate(model)

    With algorithm="async", call `optimizer.algorithm.abort()` before it. Integer buffers (batch norm's
    num_batches_tracked), those of 8 bits, and those that are not persistent, such as masks, keep their values.

    Args:
        model: a torch.nn.Module, the same on all ranks. process_set: the ranks that take part.
    Raises:
        HorovodInternalError: ranks disagree about the model, or one was lost; the model is as before.
    """

    @torch.no_grad()
    def __init__(self, model: torch.nn.Module, process_set: ProcessSet = global_process_set) -> None:
        state = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}     # shared tensors once
        self._tensors = [tensor.detach() for tensor in state.values() if torch.is_tensor(tensor)
                         and tensor.is_floating_point() and DTYPES.get(tensor.dtype) in frontend.reducible]
        means = grouped_allreduce(
            [tensor.contiguous() for tensor in self._tensors], op=Average, name="consensus", process_set=process_set
        ) if self._tensors else []
        self._own = [tensor.clone() for tensor in self._tensors]
        self._set(means)

    @torch.no_grad()
    def _set(self, values):
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.copy_(value)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._set(self._own)
