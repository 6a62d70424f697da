"""bagua_hvd's algorithms under torch's DistributedDataParallel, over gloo, NCCL or any backend.

    model = DistributedDataParallel(model)
    model.register_comm_hook(None, ddp.hook("bytegrad"))                    # what communicates gradients
    optimizer = ddp.wrap_optimizer(optimizer, model, "decentralized")       # what communicates weights, or steps itself

The gradients travel by bagua_hvd, whose ranks find each other by torch.distributed's store (or by the launcher), not by
DDP's process group. The bucket is one training/buckets.py: DDP's memory, which the core reads and writes in place.
"""
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bagua_hvd import algorithms
from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.job import basics
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.reduction.numbers import optimizer_number
from bagua_hvd.torch.distributed.start import process_set_of
from bagua_hvd.torch.distributed.works import Waiter, Work
from bagua_hvd.torch.frontend import frontend
from bagua_hvd.torch.optimizer import DistributedOptimizer
from bagua_hvd.training.buckets import Bucket, Member
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import NoSource

# What an algorithm does besides communicating gradients; a hook sees nothing but these.
_BESIDES = ("step", "before_step", "after_step", "backward_begins", "gradients_travel")
_FOR_EVER = 365 * 86400.0


def hook(algorithm: str | Algorithm | type[Algorithm] | None = None, **arguments: Any) -> Callable[..., Any]:
    """A communication hook for `model.register_comm_hook(state, hook)`.

    Args:
        algorithm: a name ("bytegrad", "powersgd", ...), an Algorithm of gradients or its class. None: the name in
            BAGUA_ALGORITHM, else "gradient_allreduce".
        arguments: for its constructor.
    Returns:
        A callable that can be pickled. The `state` it is registered with: a State, or None for one of its own.
    Raises:
        ValueError: unknown algorithm, or one that does more than communicate gradients: see wrap_optimizer().
    """
    chosen = algorithms.get(algorithm, **arguments) if arguments else algorithms.choose(algorithm, average=True)
    besides = [name for name in _BESIDES if getattr(type(chosen), name) is not getattr(algorithms.Algorithm, name)]
    if besides or chosen.uses_weights:
        raise ValueError(
            f"{type(chosen).__name__} does more than communicate gradients ({', '.join(besides) or 'weights'}): use "
            "bagua_hvd.torch.ddp.wrap_optimizer(optimizer, model, algorithm) in place of a hook"
        )
    return Hook(chosen)


class State:
    """What a hook keeps between steps: the step, error feedback, projections.

    To be pickled, copied or saved with a checkpoint of this rank; it must be given to one model's hook only. What it
    keeps belongs to buckets, and DDP cuts these anew after the first step of a process: that step goes without.

    Args:
        process_group: that of the model; None: the default group. It is not pickled.
    Attributes:
        step: backward passes communicated so far.
    """

    def __init__(self, process_group: Any = None) -> None:
        self._process_group = process_group
        self._forget({})

    def _forget(self, loaded):
        self._loaded: dict[str, Any] = loaded
        self._model: Model | None = None
        self._buckets: dict[tuple, Bucket] = {}     # by (index, shapes): DDP cuts its buckets anew after the first step
        self._used: set[tuple] = set()              # of these, in this step
        self._waiter = Waiter()

    @property
    def step(self) -> int:
        return self._model.step if self._model is not None else self._loaded.get("step", 0)

    def _begin(self, algorithm):
        group = process_set_of(self._process_group)
        self._number = optimizer_number(group.process_set_id)
        self._inits = basics.runtime.inits
        model = self._model = Model(f"ddp.{self._number}", NoSource(), group, algorithm)
        model.step = self._loaded.get("step", 0)
        return model

    def _bucket(self, given, algorithm):
        """(Bucket, its Model) of a GradBucket, with the views of this step."""
        model = self._model
        if model is None or self._inits != basics.runtime.inits:
            model = self._begin(algorithm)
        gradients = [g if g.is_contiguous() else g.as_strided((g.numel(),), (1,)) for g in given.gradients()]
        key = given.index(), tuple(tuple(gradient.shape) for gradient in gradients)
        views = [frontend.view(gradient, gradient) for gradient in gradients]
        bucket = self._buckets.get(key)
        if bucket is None:
            members = {index: Member(f"{given.index()}.{index}", tuple(view.shape), view.dtype, gradient.device)
                       for index, (view, gradient) in enumerate(zip(views, gradients, strict=True))}
            bucket = self._buckets[key] = Bucket(f"{model.name}.{given.index()}", members, model=model)
            self._take_up(key, bucket, model.group)
        bucket.clear()
        for index, view in enumerate(views):
            bucket.place(index, view)
        self._used.add(key)
        return bucket, model

    def _take_up(self, key, bucket, group):
        kept = self._loaded.get("buckets", {}).pop(key, None)
        if kept is not None:
            of = self._loaded["rank"], self._loaded["size"]
            bucket.state.load_state_dict(kept, of == (group.rank(), group.size()))

    def _communicated(self, model):
        """All buckets of a backward pass are on their way."""
        for key in self._buckets.keys() - self._used:
            del self._buckets[key]
        self._used = set()
        model.step += 1
        basics.runtime.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Of this rank; made of dicts, tuples, numbers and bytes."""
        if self._model is None:
            return dict(self._loaded)
        group = self._model.group
        waiting = self._loaded.get("buckets", {})
        return {"step": self._model.step, "rank": group.rank(), "size": group.size(),
                "buckets": {**waiting, **{key: bucket.state.state_dict() for key, bucket in self._buckets.items()}}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up a state_dict(); to be called alike on all ranks, between two steps."""
        self._forget({**state, "buckets": dict(state.get("buckets", {}))})

    def __getstate__(self):
        return self.state_dict()

    def __setstate__(self, state):
        self._process_group = None
        self.load_state_dict(state)


class _Bucketful(Work):
    """The gradients of a bucket, on their way. DDP wants a future of one tensor."""

    def _value(self):
        return self._outputs[0]


class Hook:
    """See hook()."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.__name__ = self.__qualname__ = f"bagua_hvd_{type(algorithm).__name__}_hook"
        self._state: State | None = None

    def __call__(self, state, bucket: dist.GradBucket):
        if state is None:
            if self._state is None:
                self._state = State()
            state = self._state
        ours, model = state._bucket(bucket, self.algorithm)
        if self.algorithm.takes(ours.dtype):
            operation = self.algorithm.communicate(ours, model.group)
        else:
            operation = c_fp_s(ours, model.group, average=self.algorithm.average)
        if bucket.is_last():
            state._communicated(model)
        return _Bucketful(state._waiter(operation), [bucket.buffer()], ours.name, _FOR_EVER).get_future()


def wrap_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module,
                   algorithm: str | Algorithm | type[Algorithm] | None, **arguments: Any) -> torch.optim.Optimizer:
    """The optimizer of a DistributedDataParallel model as a DistributedOptimizer, which communicates in DDP's place.

    For all algorithms: those of weights (decentralized, asynchronous, local SGD) and those that step themselves (qadam,
    onebit_adam). From now on the model synchronizes no gradients, as within its no_sync(); its own no_sync() is the
    optimizer's. Buffers are broadcast as ever.

    Args:
        optimizer: of the model's parameters. model: a DistributedDataParallel.
        algorithm, arguments: see hvd.DistributedOptimizer.
    Raises:
        ValueError: the model is no DistributedDataParallel, or has a communication hook; and as DistributedOptimizer.
    """
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"wrap_optimizer takes a DistributedDataParallel model, not {type(model).__name__}: to others "
                         "hvd.DistributedOptimizer is enough")
    if model._comm_hooks:
        raise ValueError("the model has a communication hook, which would never be called: take one or the other")
    group = process_set_of(model.process_group)
    wrapped = DistributedOptimizer(optimizer, named_parameters=model.module.named_parameters(), algorithm=algorithm,
                                   process_set=group, **arguments)
    model.require_backward_grad_sync = False
    model.no_sync = wrapped.no_sync
    return wrapped


__all__ = ["Hook", "State", "hook", "wrap_optimizer"]
