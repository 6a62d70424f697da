"""Replicas of neighbours' weights: how they begin."""
from typing import Any

import numpy as np

from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import Replicas, d_lp_s, float32
from bagua_hvd.training.buckets import Bucket


def replicas_of(bucket: Bucket, group: ProcessSet, hierarchical: bool, state: Any = None) -> Any:
    """The bucket's Replicas. First made, they are the weights of this rank and its neighbours, sent in full precision.

    Collective when they have to be made: and that is so on all ranks or on none (Reducer._agree).

    Args:
        state: where they are kept; None: with the bucket, and so in checkpoints.
    """
    if state is None:
        state = bucket.state

    def make():
        replicas = Replicas(*np.zeros((3, bucket.count), np.float32))
        if not state.loaded("replicas"):
            x = bucket.read().astype(np.float32)
            d_lp_s(x, group, float32, replicas, hierarchical=hierarchical, name=f"{bucket.name}.replicas").wait()
        return replicas

    return state.keep("replicas", make, fits=lambda kept: kept.fits(bucket.count))
