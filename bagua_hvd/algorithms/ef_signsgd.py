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
from bagua_hvd.algorithms.base import Algorithm, error_state
from bagua_hvd.primitives import c_lp_s, sign


class EFSignSGD(Algorithm):
    """Averages scaled signs of gradients, with error feedback.

    Args:
        average: False for the sum.
    """

    def __init__(self, average=True):
        self.average = average

    def takes(self, dtype):
        return sign.takes(dtype)

    def communicate(self, bucket, group):
        return c_lp_s(
            bucket, group, codec=sign, error=error_state(bucket, group), average=self.average, exchange="allgather"
        )
