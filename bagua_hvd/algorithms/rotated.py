"""Rotated: averages gradients in 2 bits per element, without memory, warm-up or full-precision steps.

ByteGrad with the codec rotated(bits). In a step all ranks use one rotation, so rank k adds levels without rotating:

    z_i  = Q(R g_i)                      R: random signs, then a Hadamard transform of each block
    s[k] = Q(mean_i z_i[k])              alltoall of z_i, allgather of s[k]
    g    = R^-1 concat_k s[k]            one transform back on each rank

R depends on step, bucket and element. For one rank, E R^-1 Q(R g) = g, except for the effect of a few dominating
elements (docs/decisions/algorithms.md, 55). error_feedback: as in bytegrad.py.

Wire: 2 N (n-1)/n codes per rank of bits/8 bytes, and 1/128 byte each for scales: with 2 bits a fifteenth of float32.
State: none; with error_feedback 4 (N + N/n) bytes per rank. Source: EDEN, Vargaftik et al., arXiv:2108.08842; one
rotation for all: THC, Li et al., arXiv:2302.08545. Differs: native/kernel/rotated.h.
"""
from bagua_hvd.algorithms.bytegrad import ByteGrad
from bagua_hvd.codecs import rotated


class Rotated(ByteGrad):
    """Averages randomly rotated gradients in a few bits. Unsupported dtypes are sent by gradient_allreduce.

    Args:
        bits: per element, 1 to 4. Use 1 with SGD and error_feedback.
        block: number of elements that are rotated together, 256, 512, 1024 or 2048.
        error_feedback: add quantization errors back in the next step.
        hierarchical, average: see ByteGrad.
    Raises:
        ValueError: bits or block has another value.
    """

    def __init__(self, bits: int = 2, block: int = 512, error_feedback: bool = False, hierarchical: bool = True,
                 average: bool = True) -> None:
        super().__init__(hierarchical, average, error_feedback, rotated(bits, block))
