"""Broadcasts parameters, optimizer state and Python objects; gathers objects; averages models; clips gradients."""
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bagua_hvd.collectives import objects
from bagua_hvd.collectives.objects import extremes
from bagua_hvd.core.util import doc_from, in_window
from bagua_hvd.job import basics
from bagua_hvd.job.basics import Average
from bagua_hvd.job.process_sets import ProcessSet, global_process_set
from bagua_hvd.torch.compiled import eager
from bagua_hvd.torch.frontend import DTYPES, check_memory, frontend
from bagua_hvd.torch.mpi_ops import broadcast_async_, grouped_allreduce, synchronize
from bagua_hvd.torch.wrapping import Wrapped
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
    name, sizes = type(optimizer).__name__, [len(group["params"]) for group in optimizer.param_groups]
    values, is_root = _values_of(optimizer, parameters), basics.rank() == root_rank
    shared = optimizer.shared_state() if is_root and hasattr(optimizer, "adopt") else None
    name_of_root, of_root, facts, shared = broadcast_object(
        (name, sizes, _facts(values), shared) if is_root else None, root_rank, "optimizer_state")
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


class consensus:
    """Sets the floating-point tensors of a model's state_dict() to their mean over the ranks, at once. Collective.

        hvd.consensus(model)                    # from here on all ranks have the mean

        with hvd.consensus(model):              # for this block only: evaluation, a checkpoint
            evaluate(model)

    With algorithm="async", call `optimizer.algorithm.abort()` before it. Integer buffers (batch norm's
    num_batches_tracked), those of 8 bits, and those that are not persistent, such as masks, keep their values.

    Args:
        model: a torch.nn.Module, the same on all ranks. process_set: the ranks that take part.
    Raises:
        HorovodInternalError: ranks disagree about the model, or one was lost; the model is as before.
    """

    @torch.no_grad()
    def __init__(self, model: torch.nn.Module, process_set: ProcessSet = global_process_set) -> None:
        state = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}     # shared tensors once
        self._tensors = [tensor.detach() for tensor in state.values() if torch.is_tensor(tensor)
                         and tensor.is_floating_point() and DTYPES.get(tensor.dtype) in frontend.reducible]
        means = grouped_allreduce(
            [tensor.contiguous() for tensor in self._tensors], op=Average, name="consensus", process_set=process_set
        ) if self._tensors else []
        self._own = [tensor.clone() for tensor in self._tensors]
        self._set(means)

    @torch.no_grad()
    def _set(self, values):
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.copy_(value)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._set(self._own)


def clip_grad_norm_(parameters_or_optimizer: torch.optim.Optimizer | torch.Tensor | Iterable[torch.Tensor],
                    max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
    """Scales reduced gradients so that their norm, over all of them as one vector, is at most max_norm.

    Also sparse ones. For dense ones torch.nn.utils.clip_grad_norm_ does the same.

        loss.backward()
        hvd.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()

    With GradScaler, call `scaler.unscale_(optimizer)` before it and `scaler.step(optimizer)` after it.

    Args:
        parameters_or_optimizer: the DistributedOptimizer: first reduces gradients that no backward pass of this rank
            has reduced, also with gradients_untouched; all ranks must call it alike. Or parameters, whose gradients are
            used as they are.
        max_norm: the largest norm. norm_type: p of the p-norm; float("inf") for the largest magnitude.
        error_if_nonfinite: raise when the norm is NaN or infinite.
    Returns:
        The norm before clipping, a 0-D tensor; equal on all ranks, as the gradients are.
    Raises:
        RuntimeError: the norm is not finite and error_if_nonfinite is true; gradients are reduced but not scaled.
        HorovodInternalError: from the synchronization.
    """
    parameters = parameters_or_optimizer
    if isinstance(parameters, torch.optim.Optimizer):
        if isinstance(parameters, Wrapped):
            parameters._complete(agree=False)
        parameters = [parameter for group in parameters.param_groups for parameter in group["params"]]
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    clipped = [_with_dense_gradient(parameter) for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.clip_grad_norm_(clipped, max_norm, norm_type, error_if_nonfinite)


@torch.no_grad()
def _with_dense_gradient(parameter):
    """The parameter; if its gradient is sparse, a proxy tensor whose gradient is the memory of the entries."""
    if not parameter.grad.is_sparse:
        return parameter
    parameter.grad = parameter.grad.coalesce()      # adds up entries of the same row: only then do they have a norm
    values = parameter.grad._values()
    proxy = torch.empty_like(values)
    proxy.grad = values
    return proxy
