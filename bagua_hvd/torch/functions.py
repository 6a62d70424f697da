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
def broadcast_parameters(params: Any, root_rank: int) -> None:
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


def _tensor_for(value, existing, device):
    """`existing` if it fits the _TensorFacts, else a new tensor; other values unchanged."""
    if not isinstance(value, _TensorFacts):
        return value
    if isinstance(existing, torch.Tensor) and (tuple(existing.shape), existing.dtype) == (value.shape, value.dtype):
        return existing
    return torch.empty(value.shape, dtype=value.dtype, device="cpu" if value.on_cpu else device)


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
    description = broadcast_object(_describe(optimizer, parameters) if is_root else None, root_rank, "optimizer_state")
    name_of_root, groups, states, others, shared = description
    name, sizes = type(optimizer).__name__, [len(group["params"]) for group in optimizer.param_groups]
    of_root = [count for count, _ in groups]
    if shared and hasattr(optimizer, "adopt") and shared[0] == optimizer.process_set.process_set_id:
        name += f" with {type(optimizer.algorithm).__name__}"
        name_of_root += f" with {shared[1]['algorithm']}"
    # All ranks raise; otherwise the others would wait for tensors.
    if extremes([int((of_root, name_of_root) != (sizes, name))], "optimizer_state.groups", global_process_set)[0][0]:
        if name_of_root != name:
            raise ValueError(f"rank {root_rank} has the optimizer {name_of_root}, and this rank {name}")
        differs = (f"on rank {root_rank} of {of_root}" if of_root != sizes else
                   "those of another rank differ, or its optimizer is another one")
        raise ValueError(f"the optimizer {name} has parameter groups of {sizes} parameters, but {differs}")
    if not is_root:
        for group, (_, options) in zip(optimizer.param_groups, groups, strict=True):
            for key, value in options.items():
                group[key] = _tensor_for(value, group.get(key), parameters[0].device)
        for parameter, state in zip(parameters, states, strict=True):
            _allocate_state(optimizer.state, parameter, state, parameter.device)
        for key in {*_other_keys(optimizer), *others}:
            _allocate_state(optimizer.state, key, others.get(key), parameters[0].device)
    _broadcast_tensors(_tensors_of(optimizer, parameters, groups, states, others), root_rank)
    if hasattr(optimizer, "adopt"):
        optimizer.adopt(shared)


def _describe(optimizer, parameters):
    """(class name, groups as (number of parameters, options), states by parameter, other states by key, shared state of
    the algorithm). Tensors are replaced by _TensorFacts.
    """

    def facts(value):
        return _TensorFacts(tuple(value.shape), value.dtype, value.is_cpu) if isinstance(value, torch.Tensor) else value

    def plain(values):
        if not isinstance(values, Mapping):
            return facts(values)
        return {key: facts(value) for key, value in values.items() if key != "params"}

    groups = [(len(group["params"]), plain(group)) for group in optimizer.param_groups]
    states = [plain(optimizer.state[p]) if p in optimizer.state else None for p in parameters]
    others = {key: plain(optimizer.state[key]) for key in _other_keys(optimizer)}
    shared = optimizer.shared_state() if hasattr(optimizer, "adopt") else None
    return type(optimizer).__name__, groups, states, others, shared


def _other_keys(optimizer):
    """The keys of an optimizer's state that are equal on all ranks, such as "global" of some optimizers."""
    return [key for key in optimizer.state if isinstance(key, (str, int))]


def _allocate_state(states, key, state, device):
    current = states.pop(key, None)
    if isinstance(state, Mapping):
        known = current if isinstance(current, Mapping) else {}
        states[key] = {name: _tensor_for(value, known.get(name), device) for name, value in state.items()}
    elif state is not None:
        states[key] = _tensor_for(state, current, device)


def _tensors_of(optimizer, parameters, groups, states, others):
    """Yields every tensor of the state with a name that is equal on all ranks."""
    for i, (group, (_, options)) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for key, value in options.items():
            if isinstance(value, _TensorFacts):
                yield f"optimizer_state.group.{i}.{key}", group[key]
    for i, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
        for key, value in (state or {}).items():
            if isinstance(value, _TensorFacts):
                yield f"optimizer_state.{i}.{key}", optimizer.state[parameter][key]
    for key, state in others.items():
        if isinstance(state, _TensorFacts):
            yield f"optimizer_state.other.{key}", optimizer.state[key]
        for name, value in state.items() if isinstance(state, Mapping) else ():
            if isinstance(value, _TensorFacts):
                yield f"optimizer_state.other.{key}.{name}", optimizer.state[key][name]


@eager
@doc_from(objects.broadcast_object)
def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    return objects.broadcast_object(obj, root_rank, name, process_set)


@eager
@doc_from(objects.allgather_object, "Of all ranks of the job.")
def allgather_object(obj: Any, name: str | None = None) -> list:
    return objects.allgather_object(obj, name, global_process_set)
