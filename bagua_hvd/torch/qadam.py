"""BAGUA's name for the optimizer of its algorithm qadam."""
from typing import Any

import torch


class QAdamOptimizer(torch.optim.Adam):
    """torch.optim.Adam with the length of the warm-up for `algorithm="qadam"` and "onebit_adam".

    Args:
        warmup_steps: steps of plain Adam before momenta are sent instead of gradients, 1 or more. Others: as in Adam.
    """

    def __init__(self, params: Any, lr: float = 1e-3, warmup_steps: int = 100,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps={warmup_steps!r}: expected 1 or more; momenta need a variance to divide by")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.warmup_steps = warmup_steps
