"""Top-k with memory: sends only the k largest elements of each bucket, and keeps the others for later.

    v_i = g_i + e_i         S = the k largest |v_i|         e_i <- v_i outside S, 0 within
    g   = (1/n) sum_i v_i[S_i]

With bits=2, v_i within S is sent as signs and one of two magnitudes (codecs.topk), and the residual stays in e_i:

    e_i <- v_i - D(Q(v_i))  g   = (1/n) sum_i D(Q(v_i))

In every other full step (full_steps.py) S contains all elements, so that withheld ones are sent.

Wire: (n-1) k (8 bytes: index and value) per rank; with ratio 0.01 a fiftieth of N float32. bits=2: a sixth of it.
State: 4 N bytes.
Source: Aji and Heafield, arXiv:1704.05021; Stich et al., arXiv:1809.07599.
"""
from bagua_hvd.algorithms.doublesqueeze import DoubleSqueeze
from bagua_hvd.primitives import topk


class TopK(DoubleSqueeze):
    """Averages the largest gradients, and remembers the others.

    Args:
        ratio: k / N, 0 < ratio <= 1; at least one element of each bucket is sent.
        bits: per value, 2; None: values as they are.
        momentum, warmup_steps, average, hierarchical, full_steps: see DoubleSqueeze.
    """

    empties_errors = True
    exchange = "allgather"      # every rank sums all codes: nothing is encoded twice

    def __init__(self, ratio: float = 0.03, momentum: float = 0.0, warmup_steps: float = 0, average: bool = True,
                 hierarchical: bool = True, bits: int | None = None, full_steps: int | None = None) -> None:
        super().__init__(topk(ratio, bits), momentum, warmup_steps, average, hierarchical, full_steps)
