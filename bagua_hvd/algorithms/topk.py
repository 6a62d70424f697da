"""Top-k with memory: only the k largest elements of each bucket travel, the others wait.

    v_i = g_i + e_i         S = the k largest |v_i|         e_i <- v_i outside S, 0 within
    g   = (1/n) sum_i v_i[S_i]

Wire: (n-1) k (8 bytes: index and value) per rank; with ratio 0.01 a fiftieth of N float32.
State: 4 N bytes.
Source: Aji and Heafield, arXiv:1704.05021; Stich et al., arXiv:1809.07599.
"""
from bagua_hvd.algorithms.base import Algorithm, error_state
from bagua_hvd.primitives import c_lp_s, topk


class TopK(Algorithm):
    """Averages the largest gradients, and remembers the others.

    Args:
        ratio: k / N, 0 < ratio <= 1; at least one element of each bucket travels.
        average: False for the sum.
    """

    def __init__(self, ratio=0.01, average=True):
        self.codec = topk(ratio)
        self.average = average

    def takes(self, dtype):
        return self.codec.takes(dtype)

    def communicate(self, bucket, group):
        return c_lp_s(
            bucket, group, codec=self.codec, error=error_state(bucket, group), average=self.average,
            exchange="allgather",
        )
