"""Broadcasts parameters, optimizer state and Python objects; gathers objects."""
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bagua_hvd.collectives import objects
from bagua_hvd.collectives.facts import extremes
from bagua_hvd.core.util import doc_from, in_window
from bagua_hvd.job import basics
from bagua_hvd.job.process_sets import ProcessSet, global_process_set
from bagua_hvd.torch.compiled import eager
from bagua_hvd.torch.frontend import check_memory, frontend
from bagua_hvd.torch.mpi_ops import broadcast_async_, synchronize
from bagua_hvd.training.model import weights_broadcast


@eager
def broadcast_parameters(params: Mapping[str, torch.Tensor] | list[torch.Tensor] | list[tuple[str, torch.Tensor]],
                         root_rank: int) -> None:
    """Overwrites the tensors with those of the root; blocks until all have arrived.

    Args:
        params: dict such as `model.state_dict()`; or a list of tensors or of (name, tensor) pairs, in the same order on
            all ranks. None entries are skipped. Tensors may be non-contiguous (channels_last).
        root_rank: global rank.
    Raises:
        ValueError: params has another type, such as a generator: use list(model.named_parameters()). Or an entry cannot
            be broadcast (sparse, not a tensor, not initialized): the message names it, and nothing was sent.
        HorovodInternalError: ranks disagree about the tensors, or a rank was lost.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, list):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}; expected a dict such as model.state_dict(), "
                         "or a list of tensors or pairs")
    _broadcast_tensors(named, root_rank)
    weights_broadcast(global_process_set)


def refusal(tensor: Any) -> str | None:
    """Why the tensor cannot be broadcast in place, or None."""
    if not isinstance(tensor, torch.Tensor):
        return f"it is a {type(tensor).__name__}, not a tensor; broadcast it by hvd.broadcast_object"
    if torch.nn.parameter.is_lazy(tensor):
        return "it is not initialized; run a forward pass of its lazy module first"
    if tensor.layout is not torch.strided:
        return f"it is sparse ({frontend.type_name(tensor)}); broadcast it by hvd.broadcast_object"
    if not frontend.moves(tensor.dtype):
        return f"tensor type {frontend.type_name(tensor)} is not supported"
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return "it is an expanded tensor, whose elements share memory; call .contiguous()"
    return None


def _broadcast_tensors(named, root_rank):
    named = [(name, tensor) for name, tensor in named if tensor is not None]
    for place, (name, tensor) in enumerate(named):      # before sending any, which the other ranks would await
        reason = refusal(tensor)
        if reason is not None:
            raise ValueError(f"{name or f'tensor number {place}'} cannot be broadcast: {reason}")
        if not tensor.is_contiguous():
            check_memory(tensor)

    def start(entry):
        name, tensor = entry
        contiguous = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return broadcast_async_(contiguous, root_rank, name), contiguous, tensor

    def finish(started):
        handle, contiguous, tensor = started
        synchronize(handle)
        if contiguous.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
            with torch.no_grad():
                tensor.copy_(contiguous)

    in_window(named, start, finish, lambda entry: entry[1].numel() * entry[1].element_size())


@dataclass(frozen=True)
class _TensorFacts:
    """Replaces a tensor in the pickled state: enough for a rank to allocate it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


def _facts(value):
    """The value with _TensorFacts instead of tensors, also within dicts; without parameters."""
    if isinstance(value, Mapping):
        return {key: _facts(each) for key, each in value.items() if key != "params"}
    return _TensorFacts(tuple(value.shape), value.dtype, value.is_cpu) if isinstance(value, torch.Tensor) else value


def _allocated(facts, existing, device):
    """The value for its _facts(): tensors of `existing` where they fit, else new ones."""
    if isinstance(facts, Mapping):
        known = existing if isinstance(existing, Mapping) else {}
        return {key: _allocated(each, known.get(key), device) for key, each in facts.items()}
    if not isinstance(facts, _TensorFacts):
        return facts
    if isinstance(existing, torch.Tensor) and (tuple(existing.shape), existing.dtype) == (facts.shape, facts.dtype):
        return existing
    return torch.empty(facts.shape, dtype=facts.dtype, device="cpu" if facts.on_cpu else device)


def _tensors_of(facts, value, name):
    """Yields every tensor of the value with a name that is equal on all ranks."""
    if isinstance(facts, _TensorFacts):
        yield name, value
    for key, each in facts.items() if isinstance(facts, Mapping) else ():
        yield from _tensors_of(each, value[key], f"{name}.{key}")


@eager
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int,
                              model: torch.nn.Module | None = None) -> None:
    """Gives every rank the root's optimizer state and hyperparameters, and its algorithm's shared state.

    The root describes its state in one pickled object (so Python numbers, tuples, bools and None keep their types). The
    others allocate tensors, which are then broadcast in place. If the root has no state, no rank has any afterwards.

    Differs from Horovod, which creates missing state by a step with zero gradients: that moves parameters with weight
    decay, and counts a step that never happened.

    Args:
        optimizer: any torch.optim.Optimizer over the same parameters in the same order, or a DistributedOptimizer.
        root_rank: global rank.
        model: accepted for compatibility.
    Raises:
        ValueError: torch.optim.LBFGS; or, on all ranks: the class, the algorithm or the parameter groups of a rank
            differ from the root's.
        HorovodInternalError: a rank was lost.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: it is not made of tensors for each parameter")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    is_root = basics.rank() == root_rank
    name_of_root, of_root, facts, shared = broadcast_object(
        _describe(optimizer, parameters) if is_root else None, root_rank, "optimizer_state")
    name, sizes = type(optimizer).__name__, [len(group["params"]) for group in optimizer.param_groups]
    if shared and hasattr(optimizer, "adopt") and shared[0] == optimizer.process_set.process_set_id:
        name += f" with {type(optimizer.algorithm).__name__}"
        name_of_root += f" with {shared[1]['algorithm']}"
    # All ranks raise; otherwise the others would wait for tensors.
    if extremes([int((of_root, name_of_root) != (sizes, name))], "optimizer_state.groups", global_process_set)[0][0]:
        if name_of_root != name:
            raise ValueError(f"rank {root_rank} has the optimizer {name_of_root}, but this rank has {name}")
        differs = (f"on rank {root_rank} of {of_root}" if of_root != sizes else
                   "another rank has other groups or another optimizer")
        raise ValueError(f"the optimizer {name} has parameter groups of {sizes} parameters, but {differs}")
    values = _values_of(optimizer, parameters)
    if not is_root:
        device = next((parameter.device for parameter in parameters), "cpu")
        for group, options in zip(optimizer.param_groups, facts["group"].values(), strict=True):
            group.update(_allocated(options, group, device))
        for key in [*parameters, *_other_keys(optimizer)]:
            optimizer.state.pop(key, None)
        for i, state in facts["state"].items():
            optimizer.state[parameters[i]] = _allocated(state, values["state"].get(i), parameters[i].device)
        for key, state in facts["other"].items():
            optimizer.state[key] = _allocated(state, values["other"].get(key), device)
        values = _values_of(optimizer, parameters)
    _broadcast_tensors(_tensors_of(facts, values, "optimizer_state"), root_rank)
    if hasattr(optimizer, "adopt"):
        optimizer.adopt(shared)


def _describe(optimizer, parameters):
    """(class name, sizes of the groups, _facts() of the values, shared state of the algorithm)"""
    shared = optimizer.shared_state() if hasattr(optimizer, "adopt") else None
    return (type(optimizer).__name__, [len(group["params"]) for group in optimizer.param_groups],
            _facts(_values_of(optimizer, parameters)), shared)


def _values_of(optimizer, parameters):
    """An optimizer's options and state in dicts with keys that are equal on all ranks."""
    return {"group": dict(enumerate(optimizer.param_groups)),
            "state": {i: optimizer.state[p] for i, p in enumerate(parameters) if p in optimizer.state},
            "other": {key: optimizer.state[key] for key in _other_keys(optimizer)}}


def _other_keys(optimizer):
    """The keys of an optimizer's state that are equal on all ranks, such as "global" of some optimizers."""
    return [key for key in optimizer.state if isinstance(key, (str, int))]


@eager
@doc_from(objects.broadcast_object)
def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    return objects.broadcast_object(obj, root_rank, name, process_set)


@eager
@doc_from(objects.allgather_object, "Of all ranks of the job.")
def allgather_object(obj: Any, name: str | None = None) -> list:
    return objects.allgather_object(obj, name, global_process_set)
