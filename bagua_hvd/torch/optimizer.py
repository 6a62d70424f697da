"""DistributedOptimizer for torch: after backward() gradients are reduced, and step() uses them.

This file has only what torch alone needs: closures, GradScaler and LR schedulers. Hooks and the end of backward passes
are in torch/backward.py, the gradients in torch/source.py. reduction/ and algorithms/ define when and how
gradients are communicated.
"""
import inspect
import warnings
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from bagua_hvd import algorithms
from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.collectives.compression import Compressor
from bagua_hvd.core import variables
from bagua_hvd.job.basics import Adasum, Average
from bagua_hvd.job.process_sets import ProcessSet, global_process_set
from bagua_hvd.reduction.options import GradientOptions, check_passes, groups_of
from bagua_hvd.reduction.reducer import Reducer
from bagua_hvd.reduction.weight import check_alone
from bagua_hvd.torch.adasum import DistributedAdasum
from bagua_hvd.torch.backward import Backward
from bagua_hvd.torch.compiled import eager
from bagua_hvd.torch.compression import Compression
from bagua_hvd.torch.mpi_ops import allreduce, allreduce_async_
from bagua_hvd.torch.shards import counterparts
from bagua_hvd.torch.source import TorchSource, make_overflow, overflow
from bagua_hvd.torch.wrapping import (
    STATE_KEY,
    Wrapped,
    of_this_rank,
    parameters_by_name,
    places,
    with_kept,
    wrapped_class,
)
from bagua_hvd.training.model import Model


class QAdamOptimizer(torch.optim.Adam):
    """BAGUA's torch.optim.Adam with the length of the warm-up for `algorithm="qadam"` and "onebit_adam".

    Args:
        warmup_steps: steps of plain Adam before momenta are sent instead of gradients, 1 or more. Others: as in Adam.
    """

    def __init__(self, params: Any, lr: float = 1e-3, warmup_steps: int = 100,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps={warmup_steps!r}: expected 1 or more; momenta need a variance to divide by")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.warmup_steps = warmup_steps


class _Distributed(Wrapped):
    """See DistributedOptimizer."""

    def __init__(self, optimizer, named, options, backward_passes_per_step, gradients_untouched):
        super().__init__(optimizer, named)
        self.backward_passes_per_step = backward_passes_per_step
        self.op = options.op
        self.gradient_predivide_factor = options.gradient_predivide_factor
        self.sparse_as_dense = options.sparse_as_dense
        self.process_set = options.process_set
        self.algorithm = options.algorithm
        # One object for the optimizer and all its proxies. The dict of names keeps the known parameters alive;
        # synchronizes: False within skip_synchronize().
        self._protocol = SimpleNamespace(known=set(map(id, self._parameter_names)), synchronizes=True,
                                         synchronized_by_user=False)
        kept = of_this_rank(self.__dict__, options.process_set)     # loaded before wrapping
        optimizer.param_groups[0].pop(STATE_KEY, None)
        self._source = source = TorchSource(self, options.compression, self.sparse_as_dense, self.op, self.process_set)
        trained = [pair for pair in named if pair[1].requires_grad]
        members = [source.add(name, parameter) for name, parameter in trained]
        if not options.communicates:        # raises the errors that communicating ranks would raise
            self.algorithm.prepare(Model("unused", source, self.process_set, self.algorithm))
            return
        reducer = Reducer(source, members, self.algorithm, self.process_set, backward_passes_per_step,
                          options.grouped([parameter for _, parameter in trained]), **options.reducer_arguments)
        _ = reducer.number      # now: a rank may use it later than others, in its first step without a batch
        reducer.model.scaled = not gradients_untouched     # gradients may be changed after backward()
        self.reducer = reducer
        self._backward = Backward(reducer, source, gradients_untouched,
                                  [pair for pair in named if not pair[1].requires_grad])
        self._take_up(kept, reducer.load_state_dict)

    def _complete(self, agree):
        """Synchronizes for a caller that needs reduced gradients before the step; the step then does not warn.

        agree: if any rank has an overflow, all ranks skip the step.
        """
        reducer = getattr(self, "reducer", None)
        if reducer is None:
            return
        self._backward.complete()
        reducer.gradients_will_change()
        parameters = self._source.parameters
        if agree and reducer.agree_on_overflow(lambda: overflow(parameters)):
            make_overflow(parameters)
        self._protocol.synchronized_by_user = False

    def _unscaled_by(self, frame):
        """Takes the loss scale of stored gradients and residuals from the GradScaler whose method the frame runs."""
        reducer, scaler = getattr(self, "reducer", None), frame.f_locals.get("self")
        if reducer is not None:
            if callable(getattr(scaler, "get_scale", None)):
                self._source.take_scale_from(scaler)
            reducer.model.on_unscale()

    def add_param_group(self, param_group):
        """Like the class's own; also communicates the group's gradients. All ranks must call it alike.

        Raises:
            RuntimeError: the algorithm is asynchronous, and this rank has not called its abort().
        """
        if self.reducer is not None and not self.algorithm.takes_more(self.reducer.model):
            raise RuntimeError(
                f"{type(self.algorithm).__name__} cannot add parameters while each rank steps at its own pace: "
                "call optimizer.algorithm.abort() on all ranks before add_param_group(), and resume() after it"
            )
        super().add_param_group(param_group)
        group = len(self.param_groups) - 1
        named = [(f"noname.{group}.{i}", parameter) for i, parameter in enumerate(self.param_groups[-1]["params"])
                 if parameter not in self._parameter_names]     # it may come from a group that the caller took out
        self._parameter_names.update({parameter: name for name, parameter in named})
        self._protocol.known.update(id(parameter) for _, parameter in named)
        if self.reducer is not None and named:
            self._backward.add(named)

    def set_backward_passes_per_step(self, passes):
        """Changes the number of backward passes that are accumulated locally before gradients are sent."""
        check_passes(passes)
        self.backward_passes_per_step = passes
        if self.reducer is not None:
            self.reducer.set_passes(passes)

    @property
    def gradients_are(self):
        """The content of `p.grad` after this step's last backward() has returned, as a string.

        "averages" or "sums" over the ranks; "averages of the last step" (or sums), with delay=1; "pending", with
        gradients_untouched=True, until synchronize() or step(); "local", this rank's own, if the algorithm averages
        weights or momenta in this step, or no other rank takes part.
        """
        if self.reducer is None or not self.algorithm.communicates_gradients(self.reducer.model):
            return "local"
        if self._backward.gradients_untouched and not self.reducer.synchronized:
            return "pending"
        return ("averages" if self.algorithm.average else "sums") + " of the last step" * self.reducer.model.delay

    def set_weight(self, weight: float) -> None:
        """Makes the next average a weighted one: sum of w_i g_i / sum of w_i over the ranks, instead of equal weights.

            optimizer.set_weight(len(batch))
            loss_of(batch).mean().backward()

        All ranks must call it before the backward pass that communicates, in each weighted step. The weight holds for
        one window: if passes are accumulated, it is the window's, and the local gradients must be those of the mean
        over its samples.

        Args:
            weight: number of samples or tokens that this rank's gradients are the mean over; 0: it adds nothing.
        Raises:
            ValueError: op is not Average, the algorithm does not average gradients in every step, or the optimizer is
                LBFGS. On all ranks, from backward(), synchronize() or step(): a weight is negative or not finite, or
                all are 0.
        """
        if isinstance(self, torch.optim.LBFGS):
            raise ValueError("set_weight() weighs one backward pass of a step, and LBFGS makes several: use equal "
                             "batches, or another optimizer")
        if self.reducer is None:
            check_alone(weight)
        else:
            self.reducer.set_weight(weight)

    @eager
    def synchronize(self):
        """Blocks until all gradients are reduced; missing ones count as zeros. Call it once for each backward pass.

        backward() already does so, unless this rank's passes touched no parameter of the optimizer, or it was made with
        gradients_untouched=True. Horovod's pattern works unchanged:

            opt.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with opt.skip_synchronize():
                opt.step()

        Raises:
            HorovodInternalError: ranks disagreed, or one was lost; gradients are unspecified, nothing is pending.
        """
        self._complete(agree=False)
        self._protocol.synchronized_by_user = True

    def _allreduce_grad_async(self, p):
        """Reduces the gradient of one parameter by itself, in place. Returns (handle for hvd.synchronize(), None).

        For libraries that know it from Horovod. This is outside of buckets, and step() reduces the gradient again.
        """
        handle = allreduce_async_(p.grad, op=self.op, name=f"gradient.{self._parameter_names[p]}",
                                  prescale_factor=1.0 / self.gradient_predivide_factor,
                                  postscale_factor=self.gradient_predivide_factor, process_set=self.process_set)
        return handle, None

    @contextmanager
    def skip_synchronize(self):
        """Within it, step() does not synchronize, because synchronize() has been called."""
        self._protocol.synchronizes = False
        try:
            yield
        finally:
            self._protocol.synchronizes = True

    @eager
    def step(self, closure=None, **kwargs):
        """Steps as the wrapped class does. First reduces the gradients that no backward pass has reduced.

        Args:
            closure: computes gradients and returns the loss. It runs first. An optimizer that evaluates it several
                times, such as LBFGS, gets reduced gradients each time. LBFGS also gets the mean (op=Sum: the sum) of
                the ranks' losses, so that all ranks take the same path.
        """
        self._count_step()
        reducer, protocol = self.reducer, self._protocol
        for group in self._given.param_groups:
            if not protocol.known.issuperset(map(id, group["params"])):
                raise RuntimeError(
                    "a parameter was added to the param_groups of a DistributedOptimizer, or replaced another there, "
                    "and its gradient is not reduced: call add_param_group() of the DistributedOptimizer, or wrap an "
                    "optimizer of the new parameters"
                )
        if reducer is None:
            return super().step(**kwargs) if closure is None else super().step(closure=closure, **kwargs)
        if protocol.synchronizes and protocol.synchronized_by_user and reducer.synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(): the gradients have been reduced already and are not reduced again. Call "
                "step() within `with optimizer.skip_synchronize():` after optimizer.synchronize().",
                stacklevel=3,
            )
        loss = None
        if closure is not None and self.algorithm.replaces_step:
            with torch.enable_grad():
                loss = closure()
            closure = None
        if closure is not None:
            loss = super().step(closure=self._reducing(closure, reducer), **kwargs)
        else:
            self._ready_for_step(reducer)
            if self.algorithm.replaces_step:
                result = self._replaced_step(**kwargs)
            else:
                reducer.step()
                result = super().step(**kwargs)
            loss = result if loss is None else loss
        protocol.synchronized_by_user = False
        # A fused optimizer unscales gradients itself, and does nothing if GradScaler found infinities.
        found = getattr(self, "found_inf", None)
        if found is not None and reducer.model.remembers_gradients and found.item():
            reducer.model.skipped()
        self._source.applied()
        reducer.stepped()
        return loss

    # The wrapped class's step or _replaced_step() runs the hooks around the step, once, on reduced gradients.
    step.hooked = True      # torch.optim reads it

    @torch.optim.Optimizer.profile_hook_step
    def _replaced_step(self, **kwargs):
        """The algorithm's step or the class's own. Only the algorithm knows which, so hooks run here, once."""
        if self.reducer is not None and self.reducer.step():
            return None
        own = super().step.__func__
        return getattr(own, "__wrapped__", own)(self, **kwargs)

    def _ready_for_step(self, reducer):
        if self._protocol.synchronizes:
            self._backward.complete()
        reducer.before_step()

    def _reducing(self, closure, reducer):
        """The closure, after which gradients are reduced and weights are ready to be stepped from."""
        def reducing_closure():
            loss = closure()
            self._ready_for_step(reducer)
            if isinstance(self, torch.optim.LBFGS) and reducer.algorithm.communicates_gradients(reducer.model):
                # With local losses, ranks would end their line searches, or the step, at different moments.
                loss = allreduce(torch.as_tensor(loss).detach(), op=self.op, name=f"loss.{reducer.number}",
                                 process_set=self.process_set)
            return loss

        return reducing_closure

    @eager
    def zero_grad(self, *args, **kwargs):
        """Like the class's own. AssertionError: gradients are in flight, or accumulate until the window ends."""
        if self.reducer is not None:
            if self.reducer.pending:
                raise AssertionError(
                    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
                )
            self.reducer.cleared()
        return super().zero_grad(*args, **kwargs)

    def state_dict(self):
        """The class's own, with the algorithm's state on this rank as "bagua_hvd" in the first of its param_groups."""
        state, reducer = super().state_dict(), self.reducer
        if reducer is None or not (self.algorithm.relaxed or reducer.model.delay):
            return state
        return with_kept(state, self._named(reducer.state_dict()))

    def load_state_dict(self, *args, **kwargs):
        """Like the class's own; also drops pending communication, and restores the algorithm's state, if any."""
        super().load_state_dict(*args, **kwargs)
        self.param_groups[0].pop(STATE_KEY, None)
        self._protocol.synchronized_by_user = False
        if self.reducer is not None:
            self.reducer.reset()
            kept = of_this_rank(args[0] if args else kwargs["state_dict"], self.process_set)
            self._take_up(kept, self.reducer.load_state_dict)

    def forget_step(self):
        """Drops the step that has begun, and its gradients."""
        self._protocol.synchronized_by_user = False
        self.reducer.reset()
        super().zero_grad()

    def shared_state(self):
        """The argument of adopt(); None if this rank reduces nothing."""
        return self.reducer and (self.process_set.process_set_id, self._named(self.reducer.shared_state_dict()))

    def adopt(self, shared):
        """Restores one rank's shared_state(); collective. From another process set it only makes ranks agree again."""
        if self.reducer is None:
            return
        if shared is None or shared[0] != self.process_set.process_set_id:
            self.reducer.agree_again()
        else:
            self._take_up(shared[1], self.reducer.adopt)

    def _named(self, kept):
        return {**kept, "names": self._source.names} if kept else kept

    def _take_up(self, kept, load):
        """Calls `load` with an algorithm's state and its parameters' indices. ValueError: it has other parameters."""
        if kept.get("algorithm") != type(self.algorithm).__name__:
            kept = {"algorithm": kept.get("algorithm"), "names": []}    # not restored
        unnamed = {f"noname.{g}.{i}": self._parameter_names[parameter]
                   for g, group in enumerate(self.param_groups) for i, parameter in enumerate(group["params"])}
        load(kept, places(kept, self._source.names, unnamed).__getitem__)


def _check_step(optimizer, algorithm):
    """Raises ValueError if the algorithm would bypass a step() that is not torch's."""
    cls = type(optimizer)
    if algorithm.replaces_step and not inspect.unwrap(cls.step).__module__.startswith("torch.optim."):
        raise ValueError(
            f"{type(algorithm).__name__} makes the optimizer's step itself and would bypass {cls.__name__}.step(): "
            "take an optimizer of torch.optim, or an algorithm that leaves the step to the optimizer"
        )


def DistributedOptimizer(optimizer: torch.optim.Optimizer,
                         named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
                         compression: type[Compressor] = Compression.none, backward_passes_per_step: int = 1,
                         op: int = Average, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
                         groups: int | Sequence[Sequence[torch.Tensor]] | None = None, sparse_as_dense: bool = False,
                         process_set: ProcessSet = global_process_set,
                         algorithm: str | Algorithm | type[Algorithm] | None = None,
                         gradients_untouched: bool | None = None, delay: int = 0) -> torch.optim.Optimizer:
    """Wraps a torch optimizer so that gradients are reduced over the ranks while the backward pass computes them.

    When backward() returns, `p.grad` is reduced, and may be clipped, unscaled or logged. Ranks may use different
    parameters, and one without a batch may leave out its backward pass. But ranks that make several passes before a
    step, beyond backward_passes_per_step, must make the same number.

    All ranks of the set must wrap their optimizers in the same order, and take the first steps with them in the same
    order. If several ranks take part, every parameter that requires a gradient gets one of zeros here.

    Args:
        optimizer: any torch.optim.Optimizer. The result's class derives from its class and has its name. Both share
            hyperparameters and state; use only the result from then on.
        named_parameters: `model.named_parameters()`; must name all parameters of the optimizer. Others are ignored.
        compression: applied to gradients before they are sent: Compression.none, Compression.fp16 or your own.
        backward_passes_per_step: number of backward passes whose gradients are summed locally before they are sent. A
            step() before the last of them sends the sum so far. See also no_sync().
        op: Average, Sum, or Adasum (torch/adasum.py: steps are combined instead of gradients; `groups`,
            `sparse_as_dense` and `algorithm` do not apply).
        gradient_predivide_factor: f: gradients are divided by f before the sum and multiplied by f / size after it.
        num_groups: deprecated, see groups.
        groups: number of groups, or lists of parameters; one operation per group. None: buckets of about
            BAGUA_DEFAULT_BUCKET_SIZE bytes (10 MiB).
        sparse_as_dense: send sparse gradients as dense ones; else their entries are gathered. All ranks agree in the
            first step on which are sparse; a gradient that becomes sparse later is sent as a dense one.
        process_set: the ranks that reduce; others step locally. Default: all ranks; with DTensors those that hold the
            same parts of the model (torch/shards.py).
        algorithm: how gradients are communicated: a registered name such as "bytegrad", an Algorithm, or its class.
            None: BAGUA_ALGORITHM, else "gradient_allreduce". Relaxed algorithms apply to dense float gradients.
        gradients_untouched: True promises that nothing reads or changes gradients between backward() and step() (no
            clipping, no logging) without synchronize(). Then step() waits for them instead of backward(), and the 1-bit
            variants of Adam communicate during the backward pass. None: BAGUA_GRADIENTS_UNTOUCHED=1, else False.
        delay: 1: communication may last until the end of the next backward pass, so it may take a whole step.
            `p.grad` is then the reduced gradient of the previous step, zeros in the first. For algorithms that
            communicate gradients; one window of backward passes per step. See docs/algorithms.md. A single rank steps
            at once.
    Raises:
        ValueError: a wrong argument; for an unknown algorithm the message lists the known ones. Nothing was changed.
        NotImplementedError: op=Adasum on a process set, or over a number of ranks that is no power of 2.
    """
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise ValueError(f"expected an optimizer such as torch.optim.SGD(model.parameters()), not {optimizer!r:.100}")
    if isinstance(optimizer, (_Distributed, DistributedAdasum)):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    check_passes(backward_passes_per_step)
    options = GradientOptions(compression, sparse_as_dense, op, gradient_predivide_factor,
                              groups_of(num_groups, groups), process_set, algorithm, delay=delay).check()
    if options.algorithm is not None:
        _check_step(optimizer, options.algorithm)
    named = parameters_by_name(optimizer, named_parameters)
    options = options._replace(process_set=counterparts((parameter for _, parameter in named), process_set))
    if op == Adasum and options.communicates:
        return wrapped_class(optimizer, DistributedAdasum)(optimizer, named, compression, backward_passes_per_step)
    if op == Adasum:        # of one rank: its gradient is its own average
        options = options._replace(algorithm=algorithms.choose(None, average=True))
    if gradients_untouched is None:
        gradients_untouched = variables.read("BAGUA_GRADIENTS_UNTOUCHED")
    return wrapped_class(optimizer, _Distributed)(optimizer, named, options, backward_passes_per_step,
                                                  gradients_untouched)
