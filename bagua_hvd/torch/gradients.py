"""The gradients of torch parameters as a Reducer sees them (common/reducer.py): `p.grad`, its layouts, sparse ones; and
the state of torch's Adam, for the algorithms that need it.
"""
import weakref

import torch

from bagua_hvd.common import basics, native
from bagua_hvd.common.basics import Sum
from bagua_hvd.common.buckets import Member
from bagua_hvd.common.model import Adam, AdamMember
from bagua_hvd.common.reducer import Gradients
from bagua_hvd.torch.compression import Compression
from bagua_hvd.torch.frontend import DTYPES, frontend


class _SparseOperation:
    """The gathering of one sparse gradient: its indices and values in one operation."""

    def __init__(self, parameter, gradient, name, op, process_set):
        self.parameter = parameter
        self.divisor = process_set.size() if op != Sum else 1
        # allgather concatenates along the first dimension: one row for each entry.
        self.tensors = gradient._indices().t().contiguous(), gradient._values().contiguous()
        self.operation = basics.context().post(
            native.ALLGATHER, f"allgather.{name}", [frontend.view(tensor) for tensor in self.tensors],
            process_set=process_set.process_set_id,
        )

    def wait(self):
        self.operation.wait()
        indices, values = (self._gathered(i, tensor) for i, tensor in enumerate(self.tensors))
        self.parameter.grad = torch.sparse_coo_tensor(indices.t(), values / self.divisor, self.parameter.shape,
                                                      check_invariants=False)

    def _gathered(self, index, tensor):
        nbytes, dim0, owner = self.operation.result(index)
        gathered = frontend.wrap_result(nbytes, (dim0, *tensor.shape[1:]), DTYPES[tensor.dtype], owner)
        return gathered.to(tensor.device)


class TorchAdam(Adam):
    """torch.optim.Adam or AdamW over the parameters of a TorchGradients."""

    def __init__(self, optimizer, parameters):
        self.warmup_steps = getattr(optimizer, "warmup_steps", None)
        self._optimizer = weakref.ref(optimizer)
        self._parameters = parameters
        self._copies = {}           # index -> [(contiguous copy, tensor)], where the state's layout is another

    def _view(self, index, tensor):
        if tensor.is_contiguous():
            return frontend.view(tensor, tensor)
        copy = tensor.contiguous()
        self._copies.setdefault(index, []).append((copy, tensor))
        return frontend.view(copy, copy)

    def member(self, index):
        optimizer, parameter = self._optimizer(), self._parameters[index]
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        state = optimizer.state[parameter]
        if "exp_avg" not in state:
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} has no momentum and variance, and the warm-up is over: "
                "load the optimizer's state with the algorithm's, and add parameter groups before"
            )
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return AdamMember(
            self._view(index, state["exp_avg"]), self._view(index, state["exp_avg_sq"]), int(state["step"]),
            float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"],
            isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay")),
        )

    def stepped(self, index):
        for copy, tensor in self._copies.pop(index, ()):
            tensor.copy_(copy)
        state = self._optimizer().state[self._parameters[index]]
        state["step"] += 1


class TorchGradients(Gradients):
    """The gradients of some parameters; `p.grad` itself travels wherever it can."""

    def __init__(self, optimizer, compression, sparse_as_dense, op, process_set):
        self._optimizer = weakref.ref(optimizer)
        self.names = []
        self.parameters = []
        self.compression = None if compression is Compression.none else compression
        self.sparse_as_dense = sparse_as_dense
        self.op = op
        self.process_set = process_set
        self._stand_ins = {}        # index -> (tensor that travels for p.grad, compression's context)
        self._sparse_dims = {}      # index -> sparse_dim of gradients seen sparse
        self._weights = {}          # index -> contiguous copy of a weight of another layout

    def add(self, name, parameter):
        """Appends a parameter; returns its Member."""
        self.names.append(name)
        self.parameters.append(parameter)
        if parameter.dtype not in DTYPES:
            raise ValueError(f"Tensor type {frontend.type_name(parameter)} is not supported. (Parameter {name}.)")
        return Member(name, tuple(parameter.shape), DTYPES[parameter.dtype], parameter.device)

    def view(self, index):
        parameter = self.parameters[index]
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        if gradient.is_sparse:
            self._sparse_dims[index] = gradient.sparse_dim()
            gradient = gradient.to_dense()
        context = None
        if self.compression is not None:
            with torch.no_grad():
                gradient, context = self.compression.compress(gradient)
        if not gradient.is_contiguous():
            gradient = gradient.detach().contiguous()
        if gradient is not parameter.grad or index in self._sparse_dims or self.compression is not None:
            self._stand_ins[index] = (gradient, context)
        return frontend.view(gradient, gradient)

    def sparse_dim(self, index):
        gradient = self.parameters[index].grad
        if gradient is not None and gradient.is_sparse:
            return gradient.sparse_dim()
        return self._sparse_dims.get(index, 0)

    def travels_alone(self, index, sparse_dim):
        self._sparse_dims[index] = sparse_dim
        return not self.sparse_as_dense

    def communicate(self, index, name):
        parameter = self.parameters[index]
        gradient = parameter.grad
        sparse_dim = self._sparse_dims[index]
        if gradient is None:
            shape = parameter.shape
            gradient = torch.sparse_coo_tensor(
                torch.empty((sparse_dim, 0), dtype=torch.int64), parameter.new_empty((0, *shape[sparse_dim:])), shape,
                check_invariants=False,
            )
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(sparse_dim)
        return _SparseOperation(parameter, gradient, name, self.op, self.process_set)

    @torch.no_grad()
    def finish(self):
        for index, (reduced, context) in self._stand_ins.items():
            parameter = self.parameters[index]
            if self.compression is not None:
                reduced = self.compression.decompress(reduced, context)
            if index in self._sparse_dims:
                parameter.grad = reduced.to_sparse(self._sparse_dims[index])
            elif reduced is not parameter.grad:
                parameter.grad.copy_(reduced)

    def discard(self):
        self._stand_ins.clear()

    def weight(self, index):
        weight = self.parameters[index].detach()
        if not weight.is_contiguous():
            weight = self._weights[index] = weight.contiguous()
        return frontend.view(weight, weight)

    @torch.no_grad()
    def weight_written(self, index):
        if index in self._weights:
            self.parameters[index].copy_(self._weights.pop(index))

    def adam(self):
        optimizer = self._optimizer()
        if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            return f"it needs torch.optim.Adam or AdamW, not {type(optimizer).__name__}"
        for option in ("amsgrad", "maximize", "differentiable", "fused"):
            if any(group.get(option) for group in optimizer.param_groups):
                return f"it cannot serve {type(optimizer).__name__} with {option}=True"
        return TorchAdam(optimizer, self.parameters)

    @torch.no_grad()
    def overflow(self):
        """Whether any gradient holds NaN or infinity."""
        gradients = (parameter.grad for parameter in self.parameters)
        return any(not g.coalesce().values().isfinite().all() if g.is_sparse else not g.isfinite().all()
                   for g in gradients if g is not None)

    @torch.no_grad()
    def make_overflow(self):
        """Gives one gradient an infinity: a GradScaler then skips the step here, too."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.numel():
                values = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
                values[(slice(0, 1),) * values.dim()] = float("inf")
