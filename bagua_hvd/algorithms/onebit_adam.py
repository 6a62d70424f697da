"""1-bit Adam: Adam whose momentum travels as one bit per element, with error feedback, once its variance has settled.

As published (onebit_adam_published.py), but what travels is the momentum in units of the step that it makes,
p = sqrt(v) + eps:

    u = C_LP_S(m_i / p; sign_rms, e_i, f_k)     D(Q(u)) = (||u||_2 / sqrt(N)) sign(u), in both passes with its error
    m = p u

Wire after the warm-up: N/4 (n-1)/n bytes per rank.
State: 4 (N + N/n) bytes of errors.
Source: Tang et al., arXiv:2102.02888. Differs: there m itself is encoded (u = m). One scale for all elements then
gives those of small v, whose m is small, a large m and an even larger m / sqrt(v): training diverges unless v is
nowhere small, which takes very long warm-ups. v is frozen and equal on all ranks, so dividing by p changes nothing
else. Bias corrections as in QAdam, so that steps do not jump where v is frozen.
"""
from bagua_hvd.algorithms.onebit_adam_published import OneBitAdamPublished


class OneBitAdam(OneBitAdamPublished):
    """Adam with 1-bit steps; optimizers and arguments as for QAdam."""

    in_steps = True
