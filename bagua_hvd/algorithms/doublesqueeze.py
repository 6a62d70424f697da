"""DoubleSqueeze: error feedback on both passes of compressed gradient averaging, for any codec.

Rank i of n holds the bucket g_i, its error e_i, and the error f_k of the chunk k that it owns (k = i):

    v_i = g_i + e_i                             e_i <- v_i - D(Q(v_i))
    u   = mean_i D(Q(v_i))[k] + f_k             f_k <- u - D(Q(u))
    g   = concat_k D(Q(u))

What is lost in one step is sent in the next ones, so biased codecs such as sign converge, too.

Wire: two codes of N (n-1)/n elements; with sign N/4 bytes.
State: 4 (N + N/n) bytes, with momentum 4 N more; in the optimizer's state_dict.
Source: Tang et al., arXiv:1905.05957.
"""
from bagua_hvd.algorithms.error_feedback import ErrorFeedback
from bagua_hvd.codecs import Codec
from bagua_hvd.primitives import sign


class DoubleSqueeze(ErrorFeedback):
    """Averages gradients through any codec, with error feedback on both passes.

    Args:
        codec: of bagua_hvd.primitives; sign: one bit for each element.
        momentum, warmup_steps, average, hierarchical, kappa: see ErrorFeedback.
    """

    def __init__(self, codec: Codec = sign, momentum: float = 0.0, warmup_steps: float = 0,
                 average: bool = True, hierarchical: bool = False, kappa: int | None = None) -> None:
        super().__init__(codec, "scatter_gather", momentum, warmup_steps, average, hierarchical,
                         kappa)
