"""DoubleSqueeze: error feedback on both passes of compressed gradient averaging, for any codec.

Rank i of n holds the bucket g_i, its error e_i, and the error f_k of the chunk k that it owns (k = i):

    v_i = g_i + e_i                             e_i <- v_i - D(Q(v_i))
    u   = mean_i D(Q(v_i))[k] + f_k             f_k <- u - D(Q(u))
    g   = concat_k D(Q(u))

What is lost in one step is sent in the next ones, so biased codecs such as sign converge, too.

Wire: two codes of N (n-1)/n elements; with sign N/4 bytes.
State: 4 (N + N/n) bytes, in the optimizer's state_dict.
Source: Tang et al., arXiv:1905.05957.
"""
from bagua_hvd.algorithms.base import Algorithm, error_state
from bagua_hvd.primitives import c_lp_s, sign


class DoubleSqueeze(Algorithm):
    """Averages gradients through any codec, with error feedback.

    Args:
        codec: of bagua_hvd.primitives; sign: one bit for each element.
        hierarchical: full precision within hosts, codes between them.
        average: False for the sum.
    """

    def __init__(self, codec=sign, hierarchical=False, average=True):
        self.codec = codec
        self.hierarchical = hierarchical
        self.average = average

    def takes(self, dtype):
        return self.codec.takes(dtype)

    def communicate(self, bucket, group):
        return c_lp_s(
            bucket, group, codec=self.codec, error=error_state(bucket, group), average=self.average,
            hierarchical=self.hierarchical, seed=bucket.step,
        )
