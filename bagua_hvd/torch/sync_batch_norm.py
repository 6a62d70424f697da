"""Batch normalization with the statistics of all ranks' batches.

Rank i of n holds m_i values of each channel, N = sum_i m_i; m_i may differ between ranks and be 0. Per channel:

    mu_i = mean x,  M_i = sum (x - mu_i)^2                  on each rank
    mu   = sum_i m_i mu_i / N                               after one allgather of (m_i, mu_i, M_i), 2 C + 1 numbers
    var  = (sum_i M_i + m_i (mu_i - mu)^2) / N
    y    = (x - mu) / sqrt(var + eps) * weight + bias

    S_i  = sum dy,  T_i = sum dy (x - mu)                   on each rank
    S    = sum_i S_i,  T = sum_i T_i                        after one allreduce of 2 C numbers
    dx   = weight / sqrt(var + eps) * (dy - S / N - (x - mu) T / (N (var + eps)))

The gradients of weight and bias are this rank's part, T_i / sqrt(var + eps) and S_i: a DistributedOptimizer reduces
them like those of any parameter. Statistics are merged in float64, other arithmetic is in float32 at least.
"""
import warnings

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from bagua_hvd.torch.mpi_ops import Sum, allgather, allreduce_, size
from bagua_hvd.training.model import any_asynchronous


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over the batches of all ranks in training; like torch's own in eval mode or with one rank.

    In eval mode without running statistics each rank normalizes by its own batch, without communication.

    All ranks must run forward and backward equally often; a rank without data passes a batch of size 0.

    Args:
        num_features: C of an input of shape (N, C, ...), 2 to 5 dimensions, any memory format.
        eps, momentum, affine, track_running_stats, device, dtype: as in torch.nn.BatchNorm2d.
    Raises:
        ValueError: from forward: fewer than 2 dimensions; all ranks together hold only one value per channel; or
            before init(), in training.
        HorovodInternalError: from forward and backward: a rank was lost.
    """

    _warned = False

    def _check_input_dim(self, input):
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the normalized input, with its shape, dtype and memory format."""
        if not self.training or size() == 1:
            return super().forward(input)
        if any_asynchronous() and not self._warned:
            self._warned = True
            warnings.warn(
                "SyncBatchNorm with an asynchronous algorithm: every forward pass waits for all ranks, so they train "
                "in step after all, and a rank that makes fewer steps leaves the others waiting. Use BatchNorm, and "
                "hvd.consensus(model) before evaluation.",
                stacklevel=2,
            )
        self._check_input_dim(input)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)
        if self.track_running_stats and count:
            self._track(mean, variance, count)
        return output

    @torch.no_grad()
    def _track(self, mean, variance, count):
        self.num_batches_tracked += 1
        momentum = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Replaces every BatchNorm in `module` by a SyncBatchNorm over the same parameters and buffers.

        Returns:
            The module itself, changed, or its replacement if it is a BatchNorm.
        Raises:
            ValueError: a lazy BatchNorm has not seen a batch yet; a BatchNorm has a forward() of its own.
        """
        return cls._converted(module, {})       # each module once: it may occur several times

    @classmethod
    def _converted(cls, module, replacements):
        if module in replacements:
            return replacements[module]
        replacements[module] = module
        if isinstance(module, _BatchNorm):
            if isinstance(module, cls):
                return module
            if isinstance(module, LazyModuleMixin):
                raise ValueError(f"{type(module).__name__} does not know its features yet: pass a batch through "
                                 "the model before convert_sync_batchnorm()")
            if getattr(module.forward, "__func__", None) not in _FORWARDS:
                raise ValueError(f"{type(module).__name__} has its own forward(), which SyncBatchNorm would not run: "
                                 "derive it from hvd.SyncBatchNorm, or split it into a BatchNorm and a module after it")
            converted = cls(module.num_features, module.eps, module.momentum, module.affine,
                            module.track_running_stats)
            replacements[module] = converted
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
                setattr(converted, name, getattr(module, name))
            converted.training = module.training
            return converted
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = cls._converted(child, replacements)
        return module


class _Normalize(torch.autograd.Function):
    """(y, mu, var, N); the names are those of the module's formulas."""

    @staticmethod
    def forward(ctx, input, weight, bias, eps):
        x = _accurate(input)
        mu, var, N = _statistics(x)
        if N == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape} "
                             "and nothing on the other ranks")
        invstd = torch.rsqrt(var + eps)
        ctx.N = N
        ctx.save_for_backward(input, weight, mu, invstd)
        ctx.mark_non_differentiable(mu, var)
        scale = invstd if weight is None else invstd * weight
        shift = -mu * scale if bias is None else bias - mu * scale
        y = torch.addcmul(_along(shift, x), x, _along(scale, x)).to(input.dtype)
        return y, mu, var, N

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *_):
        input, weight, mu, invstd = ctx.saved_tensors
        x, dy = _accurate(input), _accurate(dy)
        dims = _all_but_channels(x)
        centered = x - _along(mu, x)
        S = dy.sum(dims, dtype=torch.float64)
        T = (dy * centered).sum(dims, dtype=torch.float64)
        d_weight = (T * invstd).to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        d_bias = S.to(input.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, d_weight, d_bias, None
        ST = allreduce_(torch.stack([S, T]), op=Sum, name=f"sync_batch_norm.backward.{len(S)}")
        if not x.numel():
            return torch.zeros_like(input), d_weight, d_bias, None
        S_by_N, T_by_N = ST / ctx.N
        scale = invstd if weight is None else invstd * weight
        dx = centered.mul_(_along(-scale * invstd.square() * T_by_N, x))
        dx.add_(_along(-scale * S_by_N, x)).addcmul_(dy, _along(scale, x))
        return dx.to(input.dtype), d_weight, d_bias, None


_FORWARDS = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward)


def _accurate(tensor):
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _all_but_channels(x):
    return [0, *range(2, x.dim())]


def _along(values, x):
    """One value per channel, in the dtype of x and shaped to broadcast with it."""
    return values.to(x.dtype).view(-1, *[1] * (x.dim() - 2))


def _statistics(x):
    """(mu, var, N) over all ranks; the tensors are float64."""
    C = x.shape[1]
    m = x.numel() // C if C else 0
    mine = torch.zeros(1, 2 * C + 1, dtype=torch.float64, device=x.device)
    if m:
        # Two passes: several times faster on the CPU than torch.var_mean, and as accurate.
        dims = _all_but_channels(x)
        mu_i = x.sum(dims, dtype=torch.float64) / m
        mine[0, :C] = mu_i
        mine[0, C:2 * C] = (x - _along(mu_i, x)).square_().sum(dims, dtype=torch.float64)
        mine[0, 2 * C] = m
    # The name contains the shape, so that layers of one width share an entry of the response cache.
    everyone = allgather(mine, name=f"sync_batch_norm.forward.{C}")
    mu_i, M_i, m_i = everyone[:, :C], everyone[:, C:2 * C], everyone[:, 2 * C:]
    N = m_i.sum()
    mu = (m_i * mu_i).sum(0) / N.clamp(min=1)
    var = (M_i + m_i * (mu_i - mu).square()).sum(0) / N.clamp(min=1)
    return mu, var, int(N)
