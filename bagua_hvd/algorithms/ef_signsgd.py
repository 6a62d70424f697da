"""EF-signSGD: the sign of gradient plus error, scaled; each rank keeps what its signs have lost.

    p_i = g_i + e_i         D(Q(p_i)) = (||p_i||_1 / N) sign(p_i)         e_i <- p_i - D(Q(p_i))
    g   = (1/n) sum_i D(Q(p_i))

Every rank sends its signs to all others and adds up all of them itself, so nothing is encoded twice. Without the error
signSGD fails even on simple convex problems.

Wire: (n-1) N/8 bytes per rank: for few ranks; DoubleSqueeze needs N/4 whatever n.
State: 4 N bytes.
Source: Karimireddy et al., arXiv:1901.09847.  Differs: the error is of the gradient, not of gradient times learning
rate, so that it does not change its meaning when the learning rate does.
"""
from bagua_hvd.algorithms.error_feedback import ErrorFeedback
from bagua_hvd.primitives import sign


class EFSignSGD(ErrorFeedback):
    """Averages scaled signs of gradients, with error feedback.

    Args:
        momentum, warmup_steps, average, hierarchical, kappa: see ErrorFeedback.
    """

    def __init__(self, momentum: float = 0.0, warmup_steps: float = 0, average: bool = True,
                 hierarchical: bool = False, kappa: int | None = None) -> None:
        super().__init__(sign, "allgather", momentum, warmup_steps, average, hierarchical,
                         kappa)
