"""1-bit Adam: sends Adam's momentum as one bit per element, with error feedback, once the variance has settled.

As QAdam (qadam.py), but with 1 bit, and with errors e_i, and f_k of the chunk k = i. Ranks send the momentum in units
of Adam's denominator, p = sqrt(v) + eps:

    u = C_LP_S(m_i / p; sign_rms, e_i, f_k)     D(Q(u)) = (||u||_2 / sqrt(N)) sign(u), in both passes with its error
    m = p u

Wire after the warm-up: N/4 (n-1)/n bytes per rank.
State: 4 (N + N/n) bytes of errors.
Source: Tang et al., arXiv:2102.02888, algorithm 1. Differs: there m itself is encoded (published=True). One scale for
all elements then gives those of small v a momentum that is too large, and training diverges unless v is nowhere small,
which takes very long warm-ups. v is frozen and equal on all ranks, so dividing by p changes nothing else. Bias
corrections as in QAdam; one scale for a bucket; m is 0 where v is; steps are bounded as there.
"""
from bagua_hvd.algorithms.qadam import QAdam
from bagua_hvd.primitives import sign_rms


class OneBitAdam(QAdam):
    """Adam with 1-bit steps; optimizers as for QAdam.

    Args:
        published: encode the momentum itself.
        hierarchical, warmup_steps, bounded: see QAdam.
    """

    codec = sign_rms
    error_feedback = True

    def __init__(self, hierarchical: bool = True, warmup_steps: int | None = None, bounded: bool = True,
                 published: bool = False) -> None:
        super().__init__(hierarchical, warmup_steps, bounded)
        self.in_steps = not published
