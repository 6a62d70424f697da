"""Clips reduced gradients, also sparse ones. For dense ones torch.nn.utils.clip_grad_norm_ does the same."""
from collections.abc import Iterable

import torch

from bagua_hvd.torch.optimizer import _Distributed


def clip_grad_norm_(parameters_or_optimizer: torch.optim.Optimizer | torch.Tensor | Iterable[torch.Tensor],
                    max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
    """Scales reduced gradients so that their norm, over all of them as one vector, is at most max_norm.

        loss.backward()
        hvd.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()

    With GradScaler, call `scaler.unscale_(optimizer)` before it and `scaler.step(optimizer)` after it.

    Args:
        parameters_or_optimizer: the DistributedOptimizer: first reduces gradients that no backward pass of this rank
            has reduced, also with gradients_untouched; all ranks must call it alike. Or parameters, whose gradients are
            used as they are.
        max_norm: the largest norm. norm_type: p of the p-norm; float("inf") for the largest magnitude.
        error_if_nonfinite: raise when the norm is NaN or infinite.
    Returns:
        The norm before clipping, a 0-D tensor; equal on all ranks, as the gradients are.
    Raises:
        RuntimeError: the norm is not finite and error_if_nonfinite is true; gradients are reduced but not scaled.
        HorovodInternalError: from the synchronization.
    """
    parameters = parameters_or_optimizer
    if isinstance(parameters, torch.optim.Optimizer):
        if isinstance(parameters, _Distributed):
            parameters._complete(agree=False)
        parameters = [parameter for group in parameters.param_groups for parameter in group["params"]]
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    clipped = [_dense(parameter) for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.clip_grad_norm_(clipped, max_norm, norm_type, error_if_nonfinite)


@torch.no_grad()
def _dense(parameter):
    """The parameter; if its gradient is sparse, a proxy tensor whose gradient is the memory of the entries."""
    if not parameter.grad.is_sparse:
        return parameter
    parameter.grad = parameter.grad.coalesce()      # adds up entries of the same row: only then do they have a norm
    values = parameter.grad._values()
    proxy = torch.empty_like(values)
    proxy.grad = values
    return proxy
