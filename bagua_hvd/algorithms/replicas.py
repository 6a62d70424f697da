"""Replicas of neighbours' weights: how they begin."""
import numpy as np

from bagua_hvd.primitives import Replicas, d_lp_s, float32


def replicas_of(bucket, group, hierarchical):
    """The bucket's Replicas. First made, they are the weights of this rank and its neighbours, sent in full precision.

    Collective when they have to be made: and that is so on all ranks or on none (Reducer._agree).
    """

    def make():
        replicas = Replicas(*np.zeros((3, bucket.count), np.float32))
        if not bucket.state.loaded("replicas"):
            x = bucket.read().astype(np.float32)
            d_lp_s(x, group, float32, replicas, hierarchical=hierarchical, name=f"{bucket.name}.replicas").wait()
        return replicas

    return bucket.state.keep("replicas", make, fits=lambda kept: len(kept.own) == bucket.count)
