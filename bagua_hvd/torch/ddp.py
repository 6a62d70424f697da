"""bagua_hvd's algorithms under torch's DistributedDataParallel, over gloo, NCCL or any backend.

    model = DistributedDataParallel(model)
    model.register_comm_hook(None, ddp.hook("bytegrad"))                    # algorithms that communicate gradients
    optimizer = ddp.wrap_optimizer(optimizer, model, "decentralized")       # or weights, or replace the step

bagua_hvd sends the gradients, not DDP's process group; its ranks find each other by torch.distributed's store (or the
launcher). A bucket is one of training/buckets.py over DDP's memory, which the core reads and writes in place.
"""
import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from bagua_hvd import algorithms
from bagua_hvd.algorithms.base import Algorithm, communication
from bagua_hvd.job import basics
from bagua_hvd.reduction.agreement import optimizer_number
from bagua_hvd.reduction.weight import Weight, check_weighable
from bagua_hvd.torch.distributed.group import process_set_of
from bagua_hvd.torch.distributed.options import besides_gradients
from bagua_hvd.torch.distributed.works import Waiter, Work
from bagua_hvd.torch.frontend import frontend
from bagua_hvd.torch.optimizer import DistributedOptimizer
from bagua_hvd.torch.source import multiply
from bagua_hvd.torch.sparse import SparseSum
from bagua_hvd.training.buckets import Bucket, Member
from bagua_hvd.training.model import Model, is_of
from bagua_hvd.training.source import Source

_FOR_EVER = 365 * 86400.0


def hook(algorithm: str | Algorithm | type[Algorithm] | None = None, **arguments: Any) -> Callable[..., Any]:
    """A communication hook for `model.register_comm_hook(state, hook)`.

    Args:
        algorithm: a name ("bytegrad", "powersgd", ...), an Algorithm that communicates gradients, or its class. None:
            the name in BAGUA_ALGORITHM, else "gradient_allreduce".
        arguments: for the algorithm's constructor; not with an instance.
    Returns:
        A picklable callable. Register it with a State as `state`, or with None to get one State for each model.
    Raises:
        ValueError: unknown algorithm, or one that does more than communicate gradients: see wrap_optimizer().
        TypeError: arguments that the algorithm does not take.
    """
    average = True
    if arguments:
        algorithm = algorithms.get(algorithm, **arguments)
        average = algorithm.average
    chosen = algorithms.choose(algorithm, average)
    if besides := besides_gradients(chosen):
        raise ValueError(
            f"{type(chosen).__name__} does more than communicate gradients ({besides}): use "
            "bagua_hvd.torch.ddp.wrap_optimizer(optimizer, model, algorithm) in place of a hook"
        )
    return Hook(chosen)


class State:
    """The state of a hook between steps: the step number, error feedback, projections.

    It can be pickled, copied and saved in this rank's checkpoint; give it to one model's hook only. Algorithm state
    belongs to buckets, and DDP rebuilds these after the first step of a process: that step runs without it. Parameters
    are identified by their order in that first step, so register the hook before it.

    Args:
        process_group: the model's; None: the default group. It is not pickled.
        scaler: the torch.amp.GradScaler that scales the model's loss; None: none does. Algorithms with error feedback
            rescale residuals when its scale changes, and drop those of a pass with infinite gradients. Not pickled.
    Attributes:
        step: number of backward passes communicated.
    Raises:
        ValueError: from the first backward pass, with an algorithm that keeps residuals: a GradScaler exists, and
            `scaler` was not given.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None,
                 scaler: torch.amp.GradScaler | None = None) -> None:
        self._process_group = process_group
        self._scaler = scaler
        self._places = WeakTensorKeyDictionary()    # parameter -> number, in the order of first use
        self._forget({})

    def _forget(self, loaded):
        self._loaded: dict[str, Any] = loaded
        self._model: Model | None = None
        # By (index, shapes, numbers of the parameters): DDP rebuilds its buckets after the first step.
        self._buckets: dict[tuple, Bucket] = {}
        self._used: set[tuple] = set()              # keys used in this step
        self._scale: float = loaded.get("loss_scale", 1.0)      # loss scale of the buckets' state
        self._snapshots: list[Callable[[], None]] = []      # restore the buckets' state from before this step
        self._overflow = False                      # found in this step
        self._weight: Weight | None = None          # of the next backward pass
        self._factor: float | None = None           # multiplies the gradients of this pass
        self._inits: int | None = None
        self._waiter = Waiter()

    def set_weight(self, weight: float) -> None:
        """Weights this rank in the next backward pass's average; see set_weight() of hvd.DistributedOptimizer.

        Raises:
            ValueError: from the backward pass, on all ranks: a weight is negative or not finite, all are 0, or the
                algorithm does not average gradients in every step.
        """
        group = self._connected()
        self._weight = Weight(weight, f"ddp.{self._number}.weight", group, self._weight)

    @property
    def step(self) -> int:
        return self._model.step if self._model is not None else self._loaded.get("step", 0)

    def _connected(self):
        """Returns the ProcessSet. After each init() this State gets a new number in it."""
        group = process_set_of(self._process_group)
        if self._inits != basics.runtime.inits:
            self._number = optimizer_number(group.process_set_id)
            self._forget(self.state_dict())     # the old job has ended, and buckets refer to it
            self._inits = basics.runtime.inits
        return group

    def _model_of(self, algorithm):
        if self._model is None or self._inits != basics.runtime.inits:
            group = self._connected()
            if algorithm.remembers_gradients and self._scaler is None:
                _check_no_scaler(algorithm)
            self._runs = type(algorithm).__name__
            if not is_of({"algorithm": self._runs, **self._loaded}, algorithm, group):    # older states do not name it
                self._loaded, self._scale = {}, 1.0
            model = Model(f"ddp.{self._number}", Source(), group, algorithm)
            model.step = self._loaded.get("step", 0)
            self._place = group.rank(), group.size()
            self._model = model
        return self._model

    def _weigh(self, gradient, algorithm):
        """Multiplies a gradient of this rank by the factor of its weight, in place."""
        if self._factor is None:
            weight, self._weight = self._weight, None
            if weight is not None:
                check_weighable(algorithm)
            self._factor = 1.0 if weight is None else weight.factor()
        multiply(gradient, self._factor)

    def _sparse(self, tensor, index, algorithm):
        """Starts to average a sparse gradient by gathering its entries. Returns (name, operation, finish)."""
        model = self._model_of(algorithm)
        self._weigh(tensor, algorithm)
        name = f"{model.name}.{index}.sparse"
        mean = SparseSum(tensor.detach().coalesce(), name, model.group, average=True)
        return name, mean.operation, functools.partial(mean.write, tensor)

    def _dense(self, given, algorithm):
        """Starts to communicate a GradBucket. Returns (name, operation, finish or None)."""
        group = self._model_of(algorithm).group
        self._weigh(given.buffer(), algorithm)
        bucket = self._bucket(given, algorithm)
        operation = communication(algorithm, bucket.dtype)(bucket, group)
        finish = None
        if self._scaler is not None and algorithm.remembers_gradients:
            finish = functools.partial(self._look_for_overflow, given.buffer())
        return bucket.name, self._waiter(operation, given.buffer()), finish

    def _bucket(self, given, algorithm):
        """The Bucket for a GradBucket, with the views of this step."""
        model = self._model_of(algorithm)
        if self._scaler is not None and not self._used:
            self._follow_scale(self._scaler.get_scale())
        gradients = _parts(given)
        places = tuple(self._places.setdefault(parameter, len(self._places)) for parameter in given.parameters())
        key = given.index(), tuple(tuple(gradient.shape) for gradient in gradients), places
        views = [frontend.view(gradient, gradient) for gradient in gradients]
        bucket = self._buckets.get(key)
        if bucket is None:
            members = {index: Member(f"{given.index()}.{index}", tuple(view.shape), view.dtype, gradient.device)
                       for index, (view, gradient) in enumerate(zip(views, gradients, strict=True))}
            bucket = self._buckets[key] = Bucket(f"{model.name}.{given.index()}", members, model=model)
            self._take_up(key, bucket, model.group)
            self._snapshots.append(bucket.state.snapshot())
        bucket.clear()
        for index, view in enumerate(views):
            bucket.place(index, view)
        self._used.add(key)
        return bucket

    def _follow_scale(self, scale):
        """Called at the start of a backward pass: converts the buckets' state to the scale of its gradients."""
        states = [bucket.state for bucket in self._buckets.values()]
        if self._overflow:          # the scaler skipped that step, so its changes are undone
            for restore in self._snapshots:
                restore()
        self._overflow = False
        for state in states:
            state.scale(scale / self._scale)
        self._scale = scale
        self._snapshots = [state.snapshot() for state in states]

    def _look_for_overflow(self, reduced):
        if not torch.isfinite(reduced).all():       # |= could lose a result of another thread
            self._overflow = True

    def _take_up(self, key, bucket, group):
        kept = self._loaded.get("buckets", {}).pop(key, None)
        if kept is not None:
            of = self._loaded["rank"], self._loaded["size"]
            bucket.state.load_state_dict(kept, of == (group.rank(), group.size()))
            bucket.state.scale(self._scale / self._loaded.get("loss_scale", 1.0))

    def _communicated(self, algorithm):
        """Called when all buckets of a backward pass are in flight."""
        for key in self._buckets.keys() - self._used:
            del self._buckets[key]
        self._used, self._factor = set(), None
        self._model_of(algorithm).step += 1
        basics.runtime.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, made of dicts, tuples, numbers and bytes."""
        if self._model is None:
            return dict(self._loaded)
        rank, size = self._place
        waiting = self._loaded.get("buckets", {})
        return {"algorithm": self._runs, "step": self._model.step, "rank": rank, "size": size,
                "loss_scale": self._scale,
                "buckets": {**waiting, **{key: bucket.state.state_dict() for key, bucket in self._buckets.items()}}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state_dict(); all ranks must call it alike, between two steps."""
        self._forget({**state, "buckets": dict(state.get("buckets", {}))})

    def __getstate__(self):
        return self.state_dict()

    def __setstate__(self, state):
        State.__init__(self)
        self.load_state_dict(state)


def _check_no_scaler(algorithm):
    """Raises ValueError if a GradScaler exists: residuals of an unknown loss scale would be applied many times over."""
    if any(issubclass(type(thing), torch.amp.GradScaler) and thing.is_enabled() for thing in gc.get_objects()):
        raise ValueError(
            f"{type(algorithm).__name__} keeps errors between steps, and this process has a GradScaler: register the "
            "hook with bagua_hvd.torch.ddp.State(scaler=scaler); where it scales another model's loss, with "
            "State(scaler=torch.amp.GradScaler(enabled=False))"
        )


def _parts(given):
    """The gradients of a GradBucket, contiguous; the whole bucket as one if the gradients do not cover it.

    For complex gradients DDP gives views of only the first half of the memory, which holds pairs of real numbers.
    """
    parts = given.gradients()
    if sum(part.numel() for part in parts) != given.buffer().numel():
        return [given.buffer()]
    return [part if part.is_contiguous() else part.as_strided((part.numel(),), (1,)) for part in parts]


class Hook:
    """See hook()."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.__name__ = self.__qualname__ = f"bagua_hvd_{type(algorithm).__name__}_hook"
        self._forget()

    def _forget(self):
        self._states = WeakTensorKeyDictionary()    # parameter -> State: a GradBucket does not name its model
        self._begun: State | None = None            # of the last model, until all its buckets have come

    def _state_of(self, bucket):
        parameters = bucket.parameters()
        state = self._states.get(parameters[0])
        if state is None:
            if bucket.index() == 0:
                self._begun = State()
            state = self._begun
            for parameter in parameters:
                self._states[parameter] = state
        return state

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name not in ("_states", "_begun")}

    def __setstate__(self, state):
        vars(self).update(state)
        self._forget()

    def __call__(self, state: State | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state = self._state_of(bucket) if state is None else state
        buffer = bucket.buffer()
        if buffer.is_sparse:
            name, operation, finish = state._sparse(buffer, bucket.index(), self.algorithm)
        else:
            name, operation, finish = state._dense(bucket, self.algorithm)
        if bucket.is_last():
            state._communicated(self.algorithm)
        work = Work(operation, [buffer], name, _FOR_EVER, finish)
        return work.get_future().then(lambda ended: ended.value()[0])       # DDP wants a future of one tensor


def wrap_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module,
                   algorithm: str | Algorithm | type[Algorithm] | None, **arguments: Any) -> torch.optim.Optimizer:
    """Wraps a DistributedDataParallel model's optimizer as a DistributedOptimizer, which communicates instead of DDP.

    Works with all algorithms, also those that communicate weights (decentralized, asynchronous, local SGD) or step
    themselves (qadam, onebit_adam). From now on the model synchronizes no gradients, as within its no_sync(); its own
    no_sync() becomes the optimizer's. Buffers are broadcast before each forward pass in training, as DDP does. The
    model can no longer be pickled or joined (model.join()).

    Args:
        optimizer: of the model's parameters. model: a DistributedDataParallel.
        algorithm, arguments: see hvd.DistributedOptimizer.
    Raises:
        ValueError: the model is not a DistributedDataParallel, has a communication hook, or static_graph=True; and as
            DistributedOptimizer.
    """
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"wrap_optimizer takes a DistributedDataParallel model, not {type(model).__name__}: for other "
                         "models use hvd.DistributedOptimizer")
    if model._comm_hooks:
        raise ValueError("the model has a communication hook, which would never be called: take one or the other")
    if model.static_graph:
        raise ValueError("static_graph=True is not supported, because the optimizer reduces the gradients, not DDP: "
                         "leave it out")
    group = process_set_of(model.process_group)
    wrapped = DistributedOptimizer(optimizer, named_parameters=model.module.named_parameters(), algorithm=algorithm,
                                   process_set=group, **arguments)
    model.require_backward_grad_sync = False
    model.no_sync = _NoSync(wrapped)
    model.join_hook = _refuse_to_join
    model.register_forward_pre_hook(_synchronize_buffers)
    return wrapped


def _synchronize_buffers(model, _):
    """Requests a broadcast of buffers: DDP makes it only before a forward pass that follows reduced gradients."""
    model.require_forward_param_sync = model.training and torch.is_grad_enabled()


def _refuse_to_join(**_):
    raise RuntimeError("model.join() is not supported, because the optimizer reduces the gradients, not DDP: on a rank "
                       "without batches, call optimizer.step() as often as on the others")


class _NoSync:
    """Makes the optimizer's no_sync() the model's, and prevents copies of the model without its optimizer."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def __call__(self):
        return self._optimizer.no_sync()

    def __reduce_ex__(self, protocol):
        raise TypeError("this DistributedDataParallel cannot be pickled or copied, because its optimizer communicates "
                        "for it: save model.module, or its state_dict()")


__all__ = ["Hook", "State", "hook", "wrap_optimizer"]
