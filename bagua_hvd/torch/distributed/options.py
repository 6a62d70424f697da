"""How large sums travel, if not in full precision: algorithms and codecs below all_reduce."""
from dataclasses import dataclass
from typing import Any

import torch

from bagua_hvd import algorithms
from bagua_hvd.codecs import Codec
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_lp_s
from bagua_hvd.torch.frontend import frontend
from bagua_hvd.training.buckets import Bucket, Member
from bagua_hvd.training.state import State


class _NoState(State):
    def keep(self, name, *_, **__):
        raise ValueError(
            f"the algorithm keeps {name!r} between steps, and all_reduce does not know which tensor is which: register "
            "bagua_hvd.torch.ddp.hook(...) on the model instead"
        )


def _bucket_of(tensor, name):
    """A Bucket of one contiguous tensor, in place."""
    view = frontend.view(tensor, tensor)
    bucket = Bucket(name, {0: Member("tensor", tuple(tensor.shape), view.dtype, tensor.device)})
    bucket.state = _NoState(name)
    bucket.place(0, view)
    return bucket


@dataclass
class Options:
    """For `init_process_group(..., pg_options=Options(...))` and new_group(): how large sums and means travel.

    Args:
        algorithm: a name, class or instance of bagua_hvd.algorithms that communicates gradients and keeps nothing
            between two steps ("bytegrad", "qsgd", "terngrad"); others as a hook, bagua_hvd.torch.ddp.
        codec: of bagua_hvd.codecs, for c_lp_s(); in place of an algorithm.
        min_bytes: smaller tensors go in full precision: losses, counts, flags.
    Raises:
        ValueError: both, or an unknown algorithm.
    """

    algorithm: Any = None
    codec: Codec | None = None
    min_bytes: int = 1 << 16

    def __post_init__(self):
        if self.algorithm is not None and self.codec is not None:
            raise ValueError("Options takes an algorithm or a codec, not both")
        if self.algorithm is not None:
            self.algorithm = algorithms.get(self.algorithm)

    def communicate(self, tensor: torch.Tensor, name: str, process_set: ProcessSet, average: bool) -> Any:
        """What is to be waited for, which reduces the tensor in place; None: in full precision."""
        if tensor.numel() * tensor.element_size() < self.min_bytes or not tensor.is_floating_point():
            return None
        bucket = _bucket_of(tensor, name)
        if self.codec is not None:
            return c_lp_s(bucket, process_set, codec=self.codec, average=average)
        if self.algorithm is None or not self.algorithm.takes(bucket.dtype):
            return None
        if not average:
            bucket.postscale_factor = float(process_set.size())
        return self.algorithm.communicate(bucket, process_set)
