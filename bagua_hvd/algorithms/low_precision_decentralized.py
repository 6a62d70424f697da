"""Low-precision decentralized SGD (DCD-PSGD): neighbours on a ring exchange quantized differences.

Rank i keeps, besides its weights x_i, three replicas: W of itself as its neighbours know it, L and R of the left and
the right neighbour. After the optimizer's step, every communication_interval steps:

    z = x + (1/3) L + (1/3) R - (5/3) W         = (W + L + R)/3 - W + u,  u what the steps since have added to W
    W += D(Q(z))                                and on the neighbours, from the same bytes: R += D(Q(z)), L += D(Q(z))
    x = W

What Q loses stays in x - W of the next round and is sent again. Replicas begin as the weights themselves, in full
precision. Two ranks: left and right are one peer. They must not change while replicas live: after a checkpoint of
another number of ranks they begin anew.

Wire per communication: 2 N bytes (two neighbours; N with two ranks) and headers, whatever n.
Memory: 12 N bytes.
Source: Tang et al., arXiv:1803.06443; BAGUA, arXiv:2107.01499.  Differs: replicas are float32 whatever the weights, of
whose dtype z is; they are exchanged and not assumed equal at the beginning, and are in the optimizer's state_dict.
"""
from bagua_hvd.algorithms.local import LocalSteps
from bagua_hvd.algorithms.replicas import replicas_of
from bagua_hvd.core.operations import Posted
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import d_lp_s, minmax_uint8
from bagua_hvd.training.buckets import Weights
from bagua_hvd.training.model import Model


class LowPrecisionDecentralized(LocalSteps):
    """Exchanges 8-bit differences of weights with two neighbours.

    Args:
        hierarchical: hosts are the neighbours, each with the mean of its ranks; one of fewer ranks than this counts for
            less (primitives.d_lp_s), so that the mean over all ranks stays.
        communication_interval, warmup_steps, full_steps: see LocalSteps.
    """

    uses_weights = ("after_step",)

    def __init__(self, hierarchical: bool = True, communication_interval: int = 1, warmup_steps: float = 0,
                 full_steps: int | None = None) -> None:
        super().__init__(communication_interval, warmup_steps, full_steps)
        self.hierarchical = hierarchical

    def after_step(self, model: Model) -> None:
        if not self.begins_interval(model):
            return
        rounds = [self._begin(bucket, model.group) for bucket in model.weights]
        for bucket, operation in zip(model.weights, rounds, strict=True):
            operation.wait()
            bucket.written()

    def _begin(self, bucket: Weights, group: ProcessSet) -> Posted:
        replicas = replicas_of(bucket, group, self.hierarchical)
        return d_lp_s(bucket, group, minmax_uint8, replicas, hierarchical=self.hierarchical,
                      before=(-5 / 3, 1 / 3, 1 / 3), after=(0, 1, 0, 0))
