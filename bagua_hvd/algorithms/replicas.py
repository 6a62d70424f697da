"""Helpers of decentralized algorithms: checks for peers, host counts, and initial replicas of weights."""
import numpy as np

from bagua_hvd.collectives.rules import registered_id
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import context
from bagua_hvd.primitives import Replicas, d_lp_s, float32
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.state import State


def require_peers(group: ProcessSet, what: str) -> None:
    """Raises ValueError if the group has one rank only, since `what` needs two or more."""
    if group.size() < 2:
        raise ValueError(f"{what} needs two ranks or more: one has no peer")


def host_count(group: ProcessSet) -> int:
    """The number of hosts of the group's ranks."""
    return context().process_set_hosts(registered_id(group))


def replicas_of(bucket: Bucket, group: ProcessSet, hierarchical: bool, state: State | None = None) -> Replicas:
    """The bucket's Replicas; initially the weights of this rank and its neighbours, sent in full precision.

    Collective when they must be made, as is then the case on all ranks (Reducer._agree).

    Args:
        state: where to keep them; None: in the bucket's state, which is in checkpoints.
    """
    kept_in = bucket.state if state is None else state

    def make() -> Replicas:
        replicas = Replicas(*np.zeros((3, bucket.count), np.float32))
        if not kept_in.loaded("replicas"):
            x: np.ndarray = bucket.read().astype(np.float32)
            d_lp_s(x, group, float32, replicas, hierarchical=hierarchical, name=f"{bucket.name}.replicas").wait()
        return replicas

    replicas: Replicas = kept_in.keep("replicas", make, fits=lambda kept: kept.fits(bucket.count))
    return replicas
