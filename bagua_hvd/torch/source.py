"""torch's Source: `p.grad` in any layout, also sparse, the parameters, and the state of torch's Adam."""
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from bagua_hvd.core.native import TensorView
from bagua_hvd.job.basics import Sum
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.torch.compiled import uncompiled
from bagua_hvd.torch.compression import Compression
from bagua_hvd.torch.frontend import DTYPES, frontend
from bagua_hvd.torch.shards import is_divided, is_sharded, local, sum_up
from bagua_hvd.torch.sparse import SparseSum
from bagua_hvd.training.adam import Adam, AdamMember
from bagua_hvd.training.buckets import Member
from bagua_hvd.training.source import Source

CHANGED = (
    "the gradient of {name} was changed while it was averaged over the ranks: change gradients after backward(), with "
    "gradients_untouched=True after optimizer.synchronize(), or in hooks registered before DistributedOptimizer(...)"
)


class _SparseGradient(SparseSum):
    """The sum or mean of the ranks' sparse gradients of one parameter; wait() gives it to the parameter."""

    compares_shapes = False     # the ranks have agreed on them, and comparing waits for a GPU

    def __init__(self, parameter, gradient, name, op, process_set):
        super().__init__(gradient, name, process_set, op != Sum)
        self._parameter = parameter

    def wait(self):
        gradient = super().wait()
        if self._parameter.requires_grad or self._parameter.grad is not None:       # see prepare()
            self._parameter.grad = gradient
        return gradient


class _Contiguous:
    """Views of tensors, and of contiguous copies of those that have another layout (channels_last)."""

    def __init__(self):
        self._copies = {}           # by key: (copy, tensor)

    def view(self, key, tensor):
        """The in-place view. Drops an earlier copy under this key, so that it is not written back."""
        self._copies.pop(key, None)
        if tensor.is_contiguous():
            return frontend.view(tensor, tensor)
        copy = tensor.contiguous()
        self._copies[key] = copy, tensor
        return frontend.view(copy, copy)

    @torch.no_grad()
    def write_back(self, key):
        """Copies new values of the view of this key back to the tensor, if the view is of a copy."""
        if key in self._copies:
            copy, tensor = self._copies.pop(key)
            tensor.copy_(copy)


class TorchAdam(Adam):
    """torch.optim.Adam or AdamW over the parameters of a TorchSource. One for all steps, because it holds copies."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Any, names: Sequence[str]) -> None:
        self.warmup_steps = getattr(optimizer, "warmup_steps", None)
        self._optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self._parameters, self._names = parameters, names
        self._layouts = _Contiguous()
        self._places: dict[int, tuple[int, int]] = {}           # id of a parameter -> (group, index in it)

    def _group(self, parameter):
        """Its parameter group; searches only if the groups have changed."""
        groups = self._optimizer().param_groups
        group, place = self._places.get(id(parameter), (0, 0))
        if not (group < len(groups) and place < len(groups[group]["params"])
                and groups[group]["params"][place] is parameter):
            self._places = {id(p): (g, i) for g, each in enumerate(groups) for i, p in enumerate(each["params"])}
            group, _ = self._places[id(parameter)]
        return groups[group]

    def member(self, index: int) -> Any:
        optimizer, parameter = self._optimizer(), self._parameters[index]
        group = self._group(parameter)
        state = optimizer.state[parameter]
        if "exp_avg" not in state:
            raise ValueError(
                f"{self._names[index]} has no momentum and variance, and the warm-up is over: unfreeze parameters and "
                "add groups before it ends, and load the optimizer's state with the algorithm's"
            )
        m, v = (self._layouts.view((index, name), local(state[name])) for name in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return AdamMember(
            m, v, int(state["step"]), float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"],
            isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay")),
        )

    def begin(self, index: int) -> None:
        parameter = self._parameters[index]
        state = self._optimizer().state[parameter]
        if "exp_avg" not in state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(parameter),
                         exp_avg_sq=torch.zeros_like(parameter))

    def moments_written(self, index: int) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self._layouts.write_back((index, name))

    def stepped(self, index: int) -> None:
        self.moments_written(index)
        self._optimizer().state[self._parameters[index]]["step"] += 1


def _references(parameter):
    return sys.getrefcount(parameter.grad)


# Old builds of PyTorch without CUDA lack it.
_uses: Any = getattr(torch._C, "_storage_Use_Count", None)


@functools.cache
def _of_one():
    """(_references() of a gradient that only a bucket's view holds, _uses() of its memory), as this torch counts."""
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    view = frontend.view(parameter.grad, parameter.grad)
    return (_references(parameter) if view else 0), _uses and _uses(parameter.grad.untyped_storage()._cdata)


def _shares_memory(gradient):
    """Whether other tensors share a gradient's memory, as far as can be known.

    For `p.unsqueeze(0)`, or a batch of one, autograd makes `p.grad` a view of a gradient that it also passes on, or
    gives to another parameter.
    """
    return _uses is None or _uses(gradient.untyped_storage()._cdata) > _of_one()[1]


def _is_nobody_elses(parameter):
    """Whether nothing else holds a parameter's gradient or shares its memory, as far as can be seen."""
    if parameter.grad is None or is_sharded(parameter) or _references(parameter) > _of_one()[0]:
        return False
    gradient = parameter.grad
    return gradient.is_cpu and gradient.is_contiguous() and not _shares_memory(gradient)


@torch.no_grad()
def multiply(gradient: torch.Tensor, factor: float) -> None:
    """Multiplies in place. Factor 0 also clears values that are not finite: NaN is the mean of no samples."""
    if factor == 0:
        gradient.zero_()
    elif factor != 1:
        gradient.mul_(factor)


@torch.no_grad()
def overflow(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether any gradient holds NaN or infinity."""
    gradients = (local(parameter.grad) for parameter in parameters)
    return any(not g.coalesce().values().isfinite().all() if g.is_sparse else not g.isfinite().all()
               for g in gradients if g is not None)


@torch.no_grad()
def make_overflow(parameters: Iterable[torch.Tensor]) -> None:
    """Puts an infinity into the gradients, so that a GradScaler skips the step here, too."""
    for parameter in parameters:
        gradient = local(parameter.grad)
        if gradient is not None and gradient.numel():
            values = gradient._values() if gradient.is_sparse else gradient
            values[(slice(0, 1),) * values.dim()] = float("inf")


def _gradient_dtype(parameter):
    """The dtype of `p.grad`, for which torch 2.10 and newer have an attribute; None there allows every dtype."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _zeros(parameter):
    """A gradient of zeros."""
    return torch.zeros_like(parameter, dtype=_gradient_dtype(parameter), requires_grad=False)


class TorchSource(Source):
    """The gradients of some parameters, and the parameters; sends `p.grad` itself wherever it can."""

    def __init__(self, optimizer: torch.optim.Optimizer, compression: Any, sparse_as_dense: bool, op: int,
                 process_set: ProcessSet) -> None:
        self._optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self.names: list[str] = []
        self.parameters: list[torch.Tensor] = []
        self._sharded = False                       # whether any is a DTensor
        self.compression = None if compression is Compression.none else compression
        self.sparse_as_dense = sparse_as_dense
        self.op = op
        self.process_set = process_set
        self._sent_tensors: dict[int, Any] = {}     # index -> (tensor sent instead of p.grad, compression's context)
        self._given: list[Any] = []                 # (index, parameter, its gradient in flight, version of that)
        self._sparse_dims: dict[int, int] = {}      # index -> sparse_dim of gradients seen sparse
        self._weights = _Contiguous()
        self._scaler: Callable[[], Any] | None = None       # a weak reference
        self._adam: Any = None           # a TorchAdam, made on first use
        self._reduced: Any = None        # (a parameter, weak reference to its reduced gradient)
        self._sums: dict[int, Any] = {}             # index -> (weak reference to a gradient that is a sum, version)
        self._adds = False                          # whether a backward pass has added to such a sum
        self._untouched: dict[int, Any] = {}        # (weak reference to a gradient of zeros, version, accumulation)

    def add(self, name: str, parameter: torch.Tensor) -> Any:
        """Appends a parameter; returns its Member."""
        if is_sharded(parameter) and self.op == Sum:
            raise ValueError(f"parameter {name} is a DTensor (fully_shard, tensor parallelism), whose gradients are "
                             "averaged: leave out op=hvd.Sum")
        self.names.append(name)
        self.parameters.append(parameter)
        self._sharded |= is_sharded(parameter)
        dtype = _gradient_dtype(parameter)
        if not DTYPES.keys() >= {parameter.dtype, dtype}:
            raise ValueError(f"Tensor type {frontend.type_name(parameter)} is not supported. (Parameter {name}.)")
        # Codecs encode whole buckets: those with divided parameters must not contain ones that the island has alike.
        place = (parameter.device, "part") if is_divided(parameter) else parameter.device
        return Member(name, tuple(local(parameter).shape), DTYPES[dtype], place)

    def begin_with_zeros(self, index: int, accumulation: Any) -> Any:
        """Gives a parameter a gradient of zeros, which the first real one replaces: that may be sparse.

        Args:
            accumulation: the parameter's AccumulateGrad node.
        Returns:
            The handle of a hook.
        """
        parameter = self.parameters[index]
        parameter.grad = zeros = _zeros(parameter)
        self._untouched[index] = weakref.ref(zeros), zeros._version, accumulation

        @uncompiled
        def first_one_comes(_):
            handle.remove()
            made, version, _node = self._untouched.pop(index, (type(None), 0, None))
            gradient = made()
            if gradient is not None and parameter.grad is gradient and gradient._version == version:
                parameter.grad = None

        handle = accumulation.register_prehook(first_one_comes)
        return handle

    def gradient(self, index: int) -> TensorView:
        parameter = self.parameters[index]
        if self._sharded:
            sum_up(parameter)
        gradient = local(parameter.grad)
        if gradient is None:
            gradient = local(_zeros(parameter))
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        dense = dense.detach().contiguous()
        return frontend.view(dense, dense)

    def prepare(self, index: int) -> TensorView:
        parameter = self.parameters[index]
        if self._sums:
            self.take_share(index)
        if self._sharded:
            sum_up(parameter)
        gradient = parameter.grad
        if gradient is None:
            gradient = _zeros(parameter)
            if parameter.requires_grad:     # one that was frozen meanwhile gets none, and does not move
                parameter.grad = gradient
        given: Any = gradient
        if self._sharded:
            gradient = local(gradient)
        sent, context = gradient, None
        if gradient.is_sparse:
            self._sparse_dims[index] = gradient.sparse_dim()
            sent = gradient.to_dense()
        elif not self._sharded and _shares_memory(gradient):
            sent, given = gradient.clone(), None        # the others may change it
        if self.factor != 1:
            multiply(sent, self.factor)
        if given is not None:
            self._given.append((index, parameter, given, given._version))
        if self.compression is not None:
            with torch.no_grad():
                sent, context = self.compression.compress(sent)
        if not sent.is_contiguous():
            sent = sent.detach().contiguous()
        if sent is not gradient or index in self._sparse_dims or self.compression is not None:
            self._sent_tensors[index] = (sent, context)
        return frontend.view(sent, sent)

    def is_frozen(self, index: int) -> bool:
        parameter = self.parameters[index]
        return parameter.grad is None and not parameter.requires_grad

    def has_gradient(self, index: int) -> bool:
        return self.parameters[index].grad is not None

    def hand_over(self, indices: Iterable[int], memory: list[TensorView] | None) -> Any:
        parameters = [self.parameters[index] for index in indices]
        self._given = []        # with delay=1 the user no longer sees these tensors
        if not all(index not in self._sent_tensors and _is_nobody_elses(parameter)
                   for index, parameter in zip(indices, parameters, strict=True)):
            return None
        before = [parameter.grad for parameter in parameters]
        now: list[Any] = ([view.owner for view in memory] if memory
                          else [torch.empty_like(gradient) for gradient in before])
        if any(new.shape != old.shape for new, old in zip(now, before, strict=True)):
            return None
        for parameter, gradient in zip(parameters, now, strict=True):
            parameter.grad = gradient
        return tuple([frontend.view(gradient, gradient) for gradient in gradients] for gradients in (before, now))

    @torch.no_grad()
    def take_share(self, index: int, adds: bool = False) -> None:
        """If a sum over the ranks will be summed again, divides it by their number.

        Args:
            adds: a backward pass is about to add to it. If none has added to any, a changed gradient was overwritten.
        """
        self._adds |= adds
        gradient = self.parameters[index].grad
        summed, version = self._sums.pop(index, (type(None), 0))
        if gradient is not None and summed() is gradient and (self._adds or gradient._version == version):
            gradient.div_(self.process_set.size())

    def applied(self) -> None:
        """Called after a step: sums that the script changed before it, as by clipping, are still sums."""
        self._sums = {index: (summed, gradient._version) for index, (summed, _) in self._sums.items()
                      if (gradient := summed()) is not None}

    def cleared(self) -> None:
        self._sums = {}

    def sparse_dim(self, index: int) -> Any:
        gradient = self.parameters[index].grad
        if gradient is not None and gradient.is_sparse:
            return gradient.sparse_dim()
        return self._sparse_dims.get(index, 0)

    def bypasses_buckets(self, index: int, sparse_dim: int) -> bool:
        self._sparse_dims[index] = sparse_dim
        return not self.sparse_as_dense

    def communicate(self, index: int, name: str) -> Any:
        parameter = self.parameters[index]
        self.take_share(index)
        gradient = parameter.grad
        sparse_dim = self._sparse_dims[index]
        if gradient is None:
            shape = parameter.shape
            gradient = torch.sparse_coo_tensor(
                torch.empty((sparse_dim, 0), dtype=torch.int64), parameter.new_empty((0, *shape[sparse_dim:])), shape,
                check_invariants=False,
            )
        else:
            multiply(gradient, self.factor)
            if not gradient.is_sparse:
                gradient = gradient.to_sparse(sparse_dim)
        return _SparseGradient(parameter, gradient, name, self.op, self.process_set)

    @torch.no_grad()
    def finish(self) -> None:
        given, self._given = self._given, []
        for index, parameter, gradient, version in given:
            now = parameter.grad
            if (now is not gradient or gradient._version != version) and now is not None:
                raise RuntimeError(CHANGED.format(name=self.names[index]))
        sent, self._sent_tensors = self._sent_tensors, {}
        for index, (reduced, context) in sent.items():
            parameter = self.parameters[index]
            if self.compression is not None:
                reduced = self.compression.decompress(reduced, context)
            gradient = local(parameter.grad)
            if gradient is None:
                continue
            if index in self._sparse_dims:
                parameter.grad = reduced.to_sparse(self._sparse_dims[index])
            elif reduced is not gradient:
                gradient.copy_(reduced)
        self._untouched.clear()     # the core updates no versions: zeros may now hold other ranks' values
        self._reduced = None
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._reduced = parameter, weakref.ref(parameter.grad)
                break
        if self.op == Sum:
            self._adds = False
            self._sums = {index: (weakref.ref(parameter.grad), parameter.grad._version)
                          for index, parameter in enumerate(self.parameters) if parameter.grad is not None}

    def holds_reduced(self) -> bool:
        if self._reduced is None:
            return False
        parameter, reduced = self._reduced
        return parameter.grad is not None and reduced() is parameter.grad

    def discard(self) -> None:
        self._sent_tensors = {}
        self._given = []

    def weight(self, index: int) -> Any:
        parameter = self.parameters[index]
        return self._weights.view(index, (local(parameter) if self._sharded else parameter).detach())

    def weight_written(self, index: int) -> None:
        self._weights.write_back(index)
        # A backward pass that needs the old weights must fail, as after torch's own steps.
        torch.autograd.graph.increment_version(self.parameters[index])

    def take_scale_from(self, scaler: Any) -> None:
        """Takes the loss scale of gradients from this GradScaler from now on."""
        self._scaler = weakref.ref(scaler)

    def loss_scale(self) -> Any:
        scaler = self._scaler and self._scaler()
        return None if scaler is None else scaler.get_scale()

    def adam(self) -> Any:
        optimizer = self._optimizer()
        if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            raise ValueError(f"it needs torch.optim.Adam or AdamW, not {type(optimizer).__name__}")
        for option in ("amsgrad", "maximize", "differentiable", "fused"):
            if any(group.get(option) for group in optimizer.param_groups):
                raise ValueError(f"it cannot serve {type(optimizer).__name__} with {option}=True")
        self._adam = self._adam or TorchAdam(optimizer, self.parameters, self.names)
        return self._adam
