"""DiLoCo: many local steps, then one step of an outer optimizer on how far they went.

theta is where all ranks stood after the last outer step. Every H steps of the user's (inner) optimizer:

    Delta = (1/n) sum_i (theta - x_i)
    m     = mu m + Delta
    theta = theta - eta (Delta + mu m)          Nesterov momentum
    x_i   = theta

It is Streaming DiLoCo (streaming_diloco.py) with one fragment, which is waited for, and in full precision.

Wire: 2 N (n-1)/n elements every H steps.
Memory: 2 N elements (theta and m), equal on all ranks.
Source: Douillard et al., arXiv:2311.08105.  Differs: the defaults, with which a training of a few hundred steps, too,
has outer steps, and none that go far beyond what the ranks have found. The paper's are 500 and 0.9, after a warm-up.
"""
from bagua_hvd.algorithms.streaming_diloco import StreamingDiLoCo


class DiLoCo(StreamingDiLoCo):
    """Local steps, and an outer Nesterov SGD over the ranks.

    Args:
        communication_interval: H, inner steps for each outer one, 1 or more.
        outer_lr: eta. outer_momentum: mu, 0 <= mu < 1.
        warmup_steps: steps with averaged gradients before; the paper begins with a model that has been trained so for a
            quarter of all steps.
        full_steps, quorum, grace_s: see StreamingDiLoCo.
    """

    def __init__(self, communication_interval: int = 8, outer_lr: float = 0.7, outer_momentum: float = 0.5,
                 warmup_steps: float = 0, full_steps: int | None = None, quorum: float | None = None,
                 grace_s: float = 1.0) -> None:
        super().__init__(communication_interval, fragments=1, overlap_steps=0, mixing=0, outer_lr=outer_lr,
                         outer_momentum=outer_momentum, codec=None, warmup_steps=warmup_steps, full_steps=full_steps,
                         quorum=quorum, grace_s=grace_s)
