"""TorchState: uses state_dict() for objects that have one, pickle for the rest."""
import copy
import functools
import hashlib
import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bagua_hvd.job import basics
from bagua_hvd.job.elastic import ObjectState
from bagua_hvd.reduction.agreement import numbers_of, share_numbers, take_numbers
from bagua_hvd.reduction.every_step import EveryStep, refuse, why_not
from bagua_hvd.torch.elastic.sampler import ElasticSampler
from bagua_hvd.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    refusal,
)
from bagua_hvd.torch.load_balancing import LoadBalancingDistributedSampler
from bagua_hvd.torch.wrapping import Wrapped


class StateHandler:
    """Saves, restores and synchronizes one object, `value`, of a TorchState; subclasses say how."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Saves the object's current state, to which restore() returns."""
        raise NotImplementedError

    def restore(self) -> None:
        """Returns the object to its state at the last save()."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives the object the state of rank 0, and saves it. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts the object to a new rank and size. Most handlers do nothing."""

    def set_value(self, value: Any) -> None:
        """Replaces the object by another one, and saves that."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """For objects with state_dict() and load_state_dict(): LR schedulers, a GradScaler, data loaders."""

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy: optimizers keep the tensors that they load, and would change them.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def forget(self) -> None:
        """Drops the saved state."""
        self._saved = None

    def sync(self) -> None:
        self.receive(0)
        self.save()

    def receive(self, root_rank: int) -> None:
        """Gives the object the state of rank `root_rank`. Collective."""
        state = broadcast_object(self.value.state_dict(), root_rank, name="elastic.state_dict")
        if basics.rank() != root_rank:
            self.value.load_state_dict(state)


class ModelStateHandler(StateDictHandler):
    """For torch.nn.Module. Does not send frozen parameters that all ranks already have, as with LoRA."""

    def receive(self, root_rank: int) -> None:
        state = self.value.state_dict()
        digests, *others = allgather_object(_digests_of_frozen(self.value, state), name="elastic.frozen")
        known = {name for name, digest in digests.items() if all(other.get(name) == digest for other in others)}
        broadcast_parameters({name: tensor for name, tensor in state.items() if name not in known}, root_rank)


def _digests_of_frozen(model, state):
    """Digests of the parameters that are not trained, by their names in the state_dict(): equal means bitwise equal."""
    # Plain tensors only: a DTensor, or a library's own class, is always sent.
    frozen = {name: state[name] for name, parameter in model.named_parameters()
              if not parameter.requires_grad and type(state.get(name)) is torch.Tensor and refusal(state[name]) is None}

    def digest(tensor):
        facts = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
        facts.update(bytes_of(tensor))
        return facts.digest()

    with ThreadPoolExecutor() as threads:       # hashlib releases the GIL
        return dict(zip(frozen, threads.map(digest, frozen.values()), strict=True))


class OptimizerStateHandler(StateDictHandler):
    """For torch.optim.Optimizer, distributed or not."""

    def receive(self, root_rank: int) -> None:
        broadcast_optimizer_state(self.value, root_rank)


class SamplerStateHandler(StateDictHandler):
    """For ElasticSampler and LoadBalancingDistributedSampler."""

    def save(self) -> None:
        self._saved = self.value.state_dict()       # a new dict of a few numbers

    def reset(self) -> None:
        self.value.reset()


_handler_registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (LoadBalancingDistributedSampler, SamplerStateHandler),
]


def get_handler_registry() -> Any:
    """The list of (type, StateHandler class) from which a TorchState takes the first match."""
    return _handler_registry


def set_handler_registry(registry: Any) -> None:
    """Replaces the list of get_handler_registry(). Existing states keep their handlers."""
    global _handler_registry
    _handler_registry = registry


def _handler_class(value):
    """The StateHandler class for the value; None: pickle it."""
    registered = next((handler for type_, handler in get_handler_registry() if isinstance(value, type_)), None)
    if registered is not None or isinstance(value, type):
        return registered
    has_both = all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    return StateDictHandler if has_both else None


def _check_plain(name, value):
    """Raises ValueError if the value holds an object that must not be pickled: its copy would refer to other copies."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for entry in entries:
        if _handler_class(entry) is not None:
            raise ValueError(f"TorchState: {name} holds a {type(entry).__name__}, which is saved and sent by its "
                             "state_dict() only as an argument of its own: pass each by itself")


def _numbered(handler):
    """The object that communicates under a number for the handler's object, or None; see share_numbers()."""
    value = handler.value
    if not isinstance(value, Wrapped):
        return None
    return value if hasattr(value, "renumber") else value.reducer


def bytes_of(tensor: torch.Tensor) -> Any:
    """The bytes of the tensor's elements as a NumPy array, in the order of its shape."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class TorchEveryStep(EveryStep):
    """EveryStep for the optimizer of a TorchState.

    Args:
        state: the TorchState. handlers: its StateHandlers, by attribute.
    """

    def __init__(self, state: Any, handlers: dict[str, Any]) -> None:
        super().__init__(state)
        self._handlers = handlers
        self._optimizer: Any = None
        self._buffers: list[tuple[dict[str, Any], str]] = []
        self._copied: list[torch.Tensor] = []       # the buffers at the end of the last step
        self._kept: list[torch.Tensor] = []         # their copies
        self._random: list[torch.Tensor] = []

    def _observe(self, observer):
        if observer is not None:
            self._optimizer = self._checked()
        if self._optimizer.reducer is not None:     # a single rank, of a job that is not elastic
            self._optimizer.reducer.observer = observer

    def _forget_step(self):
        reducer = self._optimizer.reducer
        if reducer is None:
            return False
        if self.completed is not None:
            reducer.model.drop_state(shared=False)      # residuals come from the failed step
        self._optimizer.forget_step()
        # The algorithm's shared state may differ after such a step: all ranks take it from one.
        return bool(reducer.algorithm.counts_steps or reducer.model.kinds_of_state()[1])

    @torch.no_grad()
    def _keep(self):
        self._random = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            self._random.append(torch.cuda.get_rng_state())
        buffers = [owner[name] for owner, name in self._buffers]
        if len(buffers) != len(self._kept) or any(map(operator.is_not, buffers, self._copied)):
            self._copied, self._kept = buffers, [each.clone() for each in buffers]
        elif buffers:
            torch._foreach_copy_(self._kept, buffers)

    @torch.no_grad()
    def _undo(self):
        for (owner, name), kept in zip(self._buffers, self._kept, strict=True):
            owner[name].copy_(kept)

    def _undo_random(self):
        torch.set_rng_state(self._random[0])
        for of_gpu in self._random[1:]:
            torch.cuda.set_rng_state(of_gpu)

    def sync(self) -> None:
        super().sync()
        self._buffers = [(module._buffers, name) for handler in self._handlers.values()
                         if isinstance(handler.value, torch.nn.Module) for module in handler.value.modules()
                         for name, buffer in module._buffers.items() if buffer is not None]
        self._keep()

    def _equal_data(self) -> Iterator[Any]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                for value in (parameter, *self._optimizer.state.get(parameter, {}).values()):
                    if isinstance(value, torch.Tensor):
                        yield bytes_of(value)

    def _checked(self):
        """The DistributedOptimizer. Raises ValueError: see CANNOT."""
        optimizers = [handler.value for handler in self._handlers.values() if isinstance(handler.value, Wrapped)]
        why = _why_not(optimizers)
        for handler in self._handlers.values():
            if not hasattr(handler, "receive"):
                why = why or f"{type(handler).__name__} has no receive(root_rank)"
        refuse(self._state, why)
        return optimizers[0]


def _why_not(optimizers):
    if len(optimizers) != 1:
        return f"a rank may be lost between the steps of {len(optimizers)} optimizers" if optimizers else \
            "the state holds no DistributedOptimizer"
    optimizer, = optimizers
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS changes weights between communications of one step"
    delay = optimizer.reducer.model.delay if optimizer.reducer is not None else 0
    return why_not(optimizer.op, optimizer.algorithm, delay, optimizer.process_set)


class TorchState(ObjectState):
    """Model, optimizer and other training state, as attributes.

    Modules, optimizers and other objects with state_dict() and load_state_dict() (LR schedulers, a GradScaler,
    samplers) are saved and sent by these methods; get_handler_registry() has the handlers. Other values are pickled;
    see ObjectState. Assigning another such object to its attribute replaces and saves it.

    Args:
        model, optimizer: may be None. kwargs: further attributes with their initial values.
        every_step: needs no commit(): after a loss training continues after the last step that any rank completed; see
            reduction/every_step.py. Change attributes only between optimizer.step() and the next collective.
    Raises:
        ValueError: a list or dict holds a module, an optimizer, or anything else that has a state_dict().
    """

    def __init__(self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, *,
                 every_step: bool = False, **kwargs: Any) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        self._names = frozenset(values)
        self._handlers: dict[str, Any] = {}
        self._every_step = TorchEveryStep(self, self._handlers) if every_step else None
        super().__init__(
            # A name of its own, so that it never matches a broadcast of the script.
            bcast_object=functools.partial(broadcast_object, name="elastic.state"), get_rank=basics.rank,
            **{name: value for name, value in values.items() if _handler_class(value) is None},
        )
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name in self.__dict__.get("_names", ()):
            self._handle(name, value)

    def _handle(self, name, value):
        """Finds the handler of an assigned value: None may have been replaced by an optimizer."""
        handler, handler_class = self._handlers.get(name), _handler_class(value)
        if handler_class is None:
            _check_plain(name, value)
        if handler is None and handler_class is None:
            return
        if handler is not None and type(handler) is handler_class:
            if self._every_step is not None:
                handler.value = value
            elif handler.value is not value:
                basics.wait_for_gpus()
                handler.set_value(value)
        elif handler_class is None:
            del self._handlers[name]
            self._saved_state[name] = value
        else:
            handler = self._handlers[name] = handler_class(value)
            if self._every_step is None and isinstance(handler, StateDictHandler):
                handler.save()
            self._saved_state.pop(name, None)

    def _save(self):
        basics.wait_for_gpus()      # if their results are invalid, this raises, and the previous save stays
        for handler in self._handlers.values():
            handler.save()
        super()._save()

    def _restore(self):
        for handler in self._handlers.values():
            handler.restore()
        super()._restore()

    def _sync(self):
        for handler in self._handlers.values():
            if getattr(type(handler), "sync", None) is StateDictHandler.sync:
                handler.receive(0)          # super()._sync() saves it
            else:
                handler.sync()
        share_numbers(self._numbered(), self._bcast_object)
        super()._sync()

    def _numbered(self):
        return [_numbered(handler) for handler in self._handlers.values()]

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()
        super().reset()

    def _receive(self, root_rank, whole, facts):
        # _take_facts() restores samplers.
        others = SamplerStateHandler if whole else (SamplerStateHandler, ModelStateHandler, OptimizerStateHandler)
        for handler in self._handlers.values():
            if not isinstance(handler, others):
                handler.receive(root_rank)
        facts = super()._receive(root_rank, whole, facts)
        take_numbers(self._numbered(), facts["numbers"])
        return facts

    def _facts(self):
        return {**super()._facts(), "numbers": numbers_of(self._numbered()),
                "samplers": [handler.value.state_dict() for handler in self._samplers()]}

    def _take_facts(self, facts):
        super()._take_facts(facts)
        for handler, state in zip(self._samplers(), facts["samplers"], strict=True):
            handler.value.load_state_dict(state)

    def _forget_saved(self):
        for handler in self._handlers.values():
            if hasattr(handler, "forget"):
                handler.forget()

    def _samplers(self):
        return [handler for handler in self._handlers.values() if isinstance(handler, SamplerStateHandler)]

    def _save_counters(self):
        for handler in self._samplers():
            handler.save()
        super()._save_counters()

    def _restore_counters(self):
        for handler in self._samplers():
            handler.restore()
        super()._restore_counters()
