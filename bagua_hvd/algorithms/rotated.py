"""Rotated: averages of gradients in 2 bits an element, without memory, warm-up or full-precision steps.

ByteGrad with the codec rotated(bits). All ranks rotate alike in a step, so rank k adds its chunk's levels as they are:

    z_i  = Q(R g_i)                      R: random signs, then a Hadamard transform of each block
    s[k] = Q(mean_i z_i[k])              alltoall of z_i, allgather of s[k]
    g    = R^-1 concat_k s[k]            one transform back on each rank

R is a function of step, bucket and element. Of one rank, E R^-1 Q(R g) = g but for what a few dominating elements
leave (docs/decisions/algorithms.md, 55). With error_feedback as in bytegrad.py.

Wire: 2 N (n-1)/n codes per rank of bits/8 bytes, and 1/128 byte each for scales: with 2 bits a fifteenth of float32.
State: none; with error_feedback 4 (N + N/n) bytes per rank. Source: EDEN, Vargaftik et al., arXiv:2108.08842; one
rotation for all: THC, Li et al., arXiv:2302.08545. Differs: native/kernel/rotated.h.
"""
from bagua_hvd.algorithms.bytegrad import ByteGrad
from bagua_hvd.codecs import rotated


class Rotated(ByteGrad):
    """Averages randomly rotated gradients in a few bits. Dtypes that the codec takes; others go by gradient_allreduce.

    Args:
        bits: of an element, 1 to 4. 1: with SGD and error_feedback.
        block: elements that are rotated together, 256, 512, 1024 or 2048.
        error_feedback: carry what quantization lost into the next step.
        hierarchical, average: see ByteGrad.
    Raises:
        ValueError: bits or block is something else.
    """

    def __init__(self, bits: int = 2, block: int = 512, error_feedback: bool = False, hierarchical: bool = True,
                 average: bool = True) -> None:
        super().__init__(hierarchical, average, error_feedback, rotated(bits, block))
        self.bits = bits
        self.block = block
