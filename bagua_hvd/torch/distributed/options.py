"""Reduced precision for large sums: algorithms and codecs under all_reduce."""
from dataclasses import dataclass
from typing import Any

import torch

from bagua_hvd import algorithms
from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.codecs import Codec
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_lp_s
from bagua_hvd.torch.frontend import frontend
from bagua_hvd.training.buckets import Bucket, Member
from bagua_hvd.training.state import State

_KEEPS = ("keeps errors between steps, and all_reduce does not know which tensor is which: register "
          "bagua_hvd.torch.ddp.hook(...) on the model instead")


class _NoState(State):
    def keep(self, name, *_, **__):
        raise ValueError(f"the algorithm {_KEEPS} ({name!r})")


class _Call(Bucket):
    """The tensor of one all_reduce. Its number in the group serves as the step."""

    step = 0        # a property of other buckets


# Methods for more than communicating gradients: neither an all_reduce nor a DDP hook can call them.
_BESIDES = ("step", "before_step", "after_step", "backward_begins", "communicates_gradients")


def besides_gradients(algorithm: Algorithm) -> str:
    """Names what the algorithm does besides communicating gradients; "" if nothing."""
    return ", ".join(algorithm.overrides(*_BESIDES)) or ("weights" if algorithm.uses_weights else "")


@dataclass
class Options:
    """Precision of large sums and means, for `init_process_group(..., pg_options=Options(...))` and new_group().

    Args:
        algorithm: a name, class or instance of bagua_hvd.algorithms that communicates gradients and keeps no state
            between steps ("bytegrad", "rotated"). Use others as a hook, bagua_hvd.torch.ddp.
        codec: of bagua_hvd.codecs, for c_lp_s(); instead of an algorithm.
        min_bytes: smaller tensors (losses, counts, flags) are sent in full precision. Default: 64 KiB.

    Both apply to all_reduce only. reduce_scatter and all_gather, which FSDP uses, stay in full precision.

    Raises:
        ValueError: both are given, or the algorithm is unknown, does more than communicate gradients, or keeps state.
    """

    algorithm: Any = None
    codec: Codec | None = None
    min_bytes: int = 1 << 16

    def __post_init__(self):
        if self.algorithm is not None and self.codec is not None:
            raise ValueError("Options takes an algorithm or a codec, not both")
        if self.algorithm is not None:
            self.algorithm = algorithms.get(self.algorithm)
            name, besides = type(self.algorithm).__name__, besides_gradients(self.algorithm)
            if besides:
                raise ValueError(f"{name} does more than communicate gradients ({besides}): use "
                                 "bagua_hvd.torch.ddp.wrap_optimizer(optimizer, model, algorithm) in place of Options")
            if self.algorithm.remembers_gradients:
                raise ValueError(f"{name} {_KEEPS}")

    @property
    def relaxed(self) -> bool:
        """Whether anything is sent in less than full precision."""
        return self.algorithm is not None or self.codec is not None

    def communicate(self, tensor: torch.Tensor, name: str, number: int, process_set: ProcessSet, average: bool,
                    prescale_factor: float = 1.0) -> Any:
        """Starts to reduce the tensor in place. Returns an object with wait(), or None: use full precision.

        number: of the call in its group; it seeds random rounding.
        """
        if tensor.numel() * tensor.element_size() < self.min_bytes or not tensor.is_floating_point():
            return None
        view = frontend.view(tensor, tensor)
        bucket = _Call(name, {0: Member("tensor", tuple(tensor.shape), view.dtype, tensor.device)}, prescale_factor)
        bucket.step = number
        bucket.state = _NoState(name)
        bucket.place(0, view)
        if self.codec is not None:
            return c_lp_s(bucket, process_set, codec=self.codec, average=average, seed=bucket.seed(number))
        if self.algorithm is None or not self.algorithm.takes(bucket.dtype):
            return None
        if average != self.algorithm.average:
            bucket.postscale_factor = float(process_set.size()) ** (-1 if average else 1)
        return self.algorithm.communicate(bucket, process_set)
