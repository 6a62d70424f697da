"""ByteGrad: allreduce with 8-bit min-max quantization, or by any other codec.

Rank i of n holds the bucket g_i (N elements), cut into n chunks g_i[k].

    s[k] = mean_i D(Q(g_i[k]))           alltoall of Q(g_i[k]), rank k averages
    g    = concat_k D(Q(s[k]))           allgather of Q(s[k]); rank k decodes its own bytes too: all ranks end bit-equal

With error_feedback, encoding errors are added back in the next step (worker error e_i, server error f_k of one chunk):

    v_i = g_i + e_i          e_i <- v_i - D(Q(v_i))
    u   = s[k] + f_k         f_k <- u - D(Q(u))

Q is the codec, by default minmax_uint8, D its inverse; |D(Q(x)) - x| <= (max x - min x) / 510, rounding aside. Wire:
2 N (n-1)/n bytes per rank, a quarter of the float32 ring, plus one header per chunk. With block(8) each block has its
own scale, for 1/64 more; block(4) halves the bytes (qgZ of ZeRO++, Wang et al., arXiv:2306.10209; with error
feedback LoCo, Xie et al., arXiv:2407.04480, but with the errors of the last step only, in float32).
State: none; with error_feedback 4 (N + N/n) bytes per rank, which are in the optimizer's state_dict. Source: Gan et
al., BAGUA, arXiv:2107.01499.  Differs: error feedback (DoubleSqueeze, Tang et al., arXiv:1905.05957) is offered, since
without it coordinates below half a level of their chunk are zeroed for as long as its range stays large (a codec that
rounds at random keeps them in the mean); and NaN or infinity in a chunk makes the whole chunk NaN on all ranks, so that
loss scaling sees it.
"""
from typing import Any

from bagua_hvd.algorithms.base import Algorithm, Safety, error_state, valid_codec, without_loss
from bagua_hvd.codecs import Codec
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_lp_s, minmax_uint8
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.tuning.cost import Cost, Ranks, coded


class ByteGrad(Algorithm):
    """Averages gradients as bytes. Dtypes that the codec does not support are sent by gradient_allreduce.

    Args:
        hierarchical: reduce in full precision within hosts, quantize between them. On one host, gradients are
            quantized between all ranks, as without.
        average: False for the sum.
        error_feedback: add quantization errors back in the next step.
        codec: from bagua_hvd.codecs, such as block(8, 256), block(4, stochastic=True) or float8().
    """

    safety = Safety.E1
    exchange = "scatter_gather"     # of c_lp_s()

    def __init__(self, hierarchical: bool = True, average: bool = True, error_feedback: bool = False,
                 codec: Codec = minmax_uint8) -> None:
        self.hierarchical = hierarchical
        self.average = average
        self.error_feedback = self.remembers_gradients = error_feedback
        self.safety = Safety.E2 if error_feedback else Safety.E1
        self.codec = valid_codec(codec)
        self.counts_steps = codec.random        # the seed

    def takes(self, dtype: int) -> bool:
        return self.codec.takes(dtype)

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Any:
        return self._by(self.codec, bucket, group)

    def leave(self, bucket: Bucket, group: ProcessSet) -> Any:
        return self._by(without_loss(bucket) if self.error_feedback else self.codec, bucket, group)

    def cost(self, elements: int, dtype: int, ranks: Ranks) -> Cost:
        return coded(self.codec, elements, dtype, ranks, self.hierarchical, self.exchange, self.error_feedback)

    def _by(self, codec: Codec, bucket: Bucket, group: ProcessSet) -> Any:
        error = error_state(bucket, group, self.hierarchical) if self.error_feedback else None
        return c_lp_s(
            bucket, group, codec=codec, error=error, average=self.average, hierarchical=self.hierarchical,
            exchange=self.exchange if codec is self.codec else "scatter_gather", seed=bucket.seed(bucket.step),
        )
