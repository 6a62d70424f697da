"""Low-precision decentralized SGD (DCD-PSGD): neighbours on a ring exchange quantized differences.

Rank i keeps, besides its weights x_i, three replicas: W of itself as its neighbours know it, L and R of the left and
the right neighbour. After the optimizer's step, every communication_interval steps:

    z = x + (1/3) L + (1/3) R - (5/3) W         = (W + L + R)/3 - W + u,  u = x - W, the steps since
    W += D(Q(z))                                and on the neighbours, from the same bytes: R += D(Q(z)), L += D(Q(z))
    x = W

The residual of Q stays in x - W of the next round and is sent again. Replicas are initialized with the weights, in full
precision. With two ranks, left and right are one peer. Neighbours must not change while replicas live: after a
checkpoint of another number of ranks, replicas are initialized again.

Wire per communication: 2 N bytes (two neighbours; N with two ranks) and headers, whatever n.
Memory: 12 N bytes.
Source: Tang et al., arXiv:1803.06443; BAGUA, arXiv:2107.01499.  Differs: replicas are float32 whatever the weights, of
whose dtype z is; they are exchanged and not assumed equal at the beginning, and are in the optimizer's state_dict.
"""
from bagua_hvd.algorithms.choco import Choco
from bagua_hvd.primitives import minmax_uint8


class LowPrecisionDecentralized(Choco):
    """Exchanges 8-bit differences of weights with two neighbours.

    Args:
        hierarchical: see Choco. communication_interval, warmup_steps, full_steps: see LocalSteps.
    """

    def __init__(self, hierarchical: bool = True, communication_interval: int = 1, warmup_steps: float = 0,
                 full_steps: int | None = None) -> None:
        super().__init__(minmax_uint8, 1, hierarchical, communication_interval, warmup_steps, full_steps)
        self.before, self.after = (-5 / 3, 1 / 3, 1 / 3), (0, 1, 0, 0)
