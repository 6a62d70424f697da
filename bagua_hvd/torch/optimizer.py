"""DistributedOptimizer for torch: hooks on the parameters feed a Reducer, step() waits for it.

What is here is what only torch has: hooks, closures, GradScaler and LR schedulers. The gradients themselves are in
torch/gradients.py; when and how they travel is common/reducer.py and algorithms/.
"""
import sys
import warnings
import weakref
from contextlib import contextmanager, nullcontext

from bagua_hvd import algorithms
from bagua_hvd.common import basics, collectives
from bagua_hvd.common.basics import Adasum, Average, Sum
from bagua_hvd.common.model import Model
from bagua_hvd.common.process_sets import global_process_set
from bagua_hvd.common.reducer import Reducer
from bagua_hvd.common.util import split_list
from bagua_hvd.torch.adasum import DistributedAdasum
from bagua_hvd.torch.compiled import eager
from bagua_hvd.torch.compression import Compression
from bagua_hvd.torch.gradients import TorchGradients

# The one key that this optimizer adds to a state_dict, and only when its algorithm has state.
STATE_KEY = "bagua_hvd"


def _hook(reducer, index):
    """For a parameter; holds the reducer weakly, so that a discarded optimizer does not live on in its model."""

    def gradient_accumulated(parameter):
        alive = reducer()
        if alive is not None:
            alive.gradient_ready(index)

    return gradient_accumulated


def _remove_hooks(handles):
    for handle in handles:
        handle.remove()


class _Distributed:
    """What DistributedOptimizer puts before the class of the optimizer it is given."""

    def __init__(self, optimizer, named, compression, backward_passes_per_step, op, gradient_predivide_factor, groups,
                 sparse_as_dense, process_set, algorithm):
        # Not the class's own __init__: its parameters are unknown. What it made is taken over; hyperparameters and
        # state are shared with the given optimizer. Patched methods (an LR scheduler's step) stay with that one.
        self.__dict__.update(
            {name: value for name, value in optimizer.__dict__.items() if not hasattr(_Distributed, name)}
        )
        self.__dict__["param_groups"] = list(optimizer.param_groups)
        self.backward_passes_per_step = backward_passes_per_step
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self.algorithm = algorithm
        self.reducer = None
        self._should_synchronize = True
        self._synchronized_by_user = False
        gradients = TorchGradients(self, compression, sparse_as_dense, op, process_set)
        members = [gradients.add(name, parameter) for name, parameter in named]
        if not process_set.included() or (basics.size() == 1 and not basics.runtime.options.elastic):
            algorithm.prepare(Model("unused", gradients, process_set))      # what is refused is refused everywhere
            return
        self._gradients = gradients
        self.reducer = Reducer(
            gradients, members, algorithm, process_set, backward_passes_per_step, groups,
            1.0 / gradient_predivide_factor, gradient_predivide_factor,
        )
        self._register_hooks(0)

    def _register_hooks(self, first):
        reference = weakref.ref(self.reducer)
        handles = [
            parameter.register_post_accumulate_grad_hook(_hook(reference, index))
            for index, parameter in enumerate(self._gradients.parameters[first:], first)
        ]
        weakref.finalize(self.reducer, _remove_hooks, handles).atexit = False

    # GradScaler.unscale_(optimizer) multiplies the gradients in place, and this read is all that it does with the
    # optimizer before. So it is here that the gradients must be complete, or it would change what is on its way, and
    # find infinities that other ranks do not find. To communicate at everyone's reading would be wrong: one rank that
    # logs its learning rate must not wait for the others. docs/decisions/0006-gradscaler.md
    @property
    def param_groups(self):
        """The parameter groups. A GradScaler that reads them synchronizes, as step() would."""
        reader = sys._getframe(1)
        if reader.f_code.co_name == "_unscale_grads_" or reader.f_globals.get("__name__", "").endswith("grad_scaler"):
            self._complete(agree=True)
        return self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups):
        self.__dict__["param_groups"] = groups

    def _complete(self, agree):
        """Synchronizes on behalf of something that needs reduced gradients before the step, which then says nothing.

        agree: the ranks skip the step together, if any of them has an overflow.
        """
        reducer = self.__dict__.get("reducer")
        if reducer is None:
            return
        reducer.model.scaled = True
        reducer.synchronize()
        if agree and reducer.agree_on_overflow(self._gradients.overflow):
            self._gradients.make_overflow()
        self._synchronized_by_user = False

    def add_param_group(self, param_group):
        """As the class's own; the group's gradients are communicated too. To be called alike on all ranks."""
        super().add_param_group(param_group)
        if self.reducer is None:
            return
        group = len(self.param_groups) - 1
        first = len(self._gradients.parameters)
        members = [
            self._gradients.add(f"noname.{group}.{i}", parameter)
            for i, parameter in enumerate(self.param_groups[-1]["params"]) if parameter.requires_grad
        ]
        self.reducer.add(members)
        self._register_hooks(first)

    def set_backward_passes_per_step(self, passes):
        """Changes how many backward passes are accumulated locally before gradients travel."""
        _check_passes(passes)
        self.backward_passes_per_step = passes
        if self.reducer is not None:
            self.reducer.set_passes(passes)

    @eager
    def synchronize(self):
        """Blocks until all gradients are reduced, those without a gradient as zeros. Once for each backward pass.

        For work on reduced gradients before the step, such as clipping:

            opt.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with opt.skip_synchronize():
                opt.step()

        For clipping, `hvd.clip_grad_norm_(opt, 1.0); opt.step()` does the same.

        Raises:
            HorovodInternalError: ranks disagreed, or one was lost; gradients are unspecified, nothing is pending.
        """
        if self.reducer is not None:
            self.reducer.model.scaled = True        # what comes between this and the step must not be lost
            self.reducer.synchronize()
            self._synchronized_by_user = True

    def no_sync(self):
        """Within it, backward passes only add to the local gradients: nothing is sent, nothing is counted.

            for i, batch in enumerate(batches):
                with contextlib.nullcontext() if i % k == k - 1 else optimizer.no_sync():
                    loss_of(batch).backward()
                if i % k == k - 1:
                    optimizer.step()
                    optimizer.zero_grad()

        does what backward_passes_per_step=k does, with a k that may change: the first backward pass after it sends the
        sum of all. With backward_passes_per_step=m, m passes outside of it make a window, as ever, and what was
        accumulated within it travels with them. A step() that follows it directly sends what there is.

        It also is for a backward pass that touches these gradients without meaning them, as a generator's does with the
        discriminator's: `with discriminator_optimizer.no_sync(): generator_loss.backward()`.

        Raises:
            RuntimeError: from step() or synchronize() within it, when there is anything to send.
        """
        return nullcontext() if self.reducer is None else self.reducer.no_sync()

    @contextmanager
    def skip_synchronize(self):
        """Within it, step() does not synchronize: synchronize() has been called."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @eager
    def step(self, closure=None, **kwargs):
        """Synchronizes, then steps as the wrapped class does.

        Args:
            closure: runs after the synchronization; gradients that it computes are synchronized in turn.
        """
        reducer = self.reducer
        if closure is not None and type(self.algorithm).step is not algorithms.Algorithm.step:
            raise ValueError(f"{type(self.algorithm).__name__} updates the weights itself: step() takes no closure")
        if reducer is not None and self._should_synchronize:
            if reducer.synchronized and self._synchronized_by_user:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients have been reduced already and are not reduced again. Call "
                    "step() within `with optimizer.skip_synchronize():` after optimizer.synchronize().",
                    stacklevel=3,
                )
            reducer.synchronize()
        self._synchronized_by_user = False
        if closure is not None:
            closure = kwargs["closure"] = self._synchronizing(closure)
        if reducer is None:
            return super().step(**kwargs)
        result = None
        if not reducer.step():
            result = super().step(**kwargs)
        reducer.stepped()
        return result

    # Hooks around the step are run by the wrapped class's step, once, on reduced gradients.
    step.hooked = True      # torch.optim reads it

    def _synchronizing(self, closure):
        def synchronizing_closure():
            loss = closure()
            if self.reducer is not None:
                self.reducer.synchronize()
            return loss

        return synchronizing_closure

    @eager
    def zero_grad(self, *args, **kwargs):
        """As the class's own.

        Raises:
            AssertionError: gradients are on their way.
        """
        if self.reducer is not None:
            if self.reducer.pending:
                raise AssertionError(
                    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
                )
            self.reducer.cleared()
        return super().zero_grad(*args, **kwargs)

    def state_dict(self):
        """The class's own, and under "bagua_hvd" the algorithm's state on this rank, if it has any."""
        state = super().state_dict()
        own = self.reducer.state_dict() if self.reducer is not None else None
        if own:
            state[STATE_KEY] = own
        return state

    def load_state_dict(self, *args, **kwargs):
        """As the class's own; also forgets pending communication, and takes up the algorithm's state, if any."""
        super().load_state_dict(*args, **kwargs)
        self._should_synchronize = True
        self._synchronized_by_user = False
        if self.reducer is not None:
            self.reducer.reset()
            state = args[0] if args else kwargs["state_dict"]
            self.reducer.load_state_dict(state.get(STATE_KEY, {}))


def _check_passes(passes):
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, not {passes}")


def _named(optimizer, named_parameters):
    """(name, parameter) of all parameters of the optimizer that require a gradient.

    In the order of named_parameters where given: the model's, equal on all ranks even where the optimizer's is not.
    """
    own = {
        parameter: f"noname.{g}.{i}"
        for g, group in enumerate(optimizer.param_groups) for i, parameter in enumerate(group["params"])
    }
    if named_parameters is None:
        named = [(name, parameter) for parameter, name in own.items()]
    else:
        named = list(named_parameters)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
            raise ValueError(
                "named_parameters should be a sequence of tuples (name, parameter), as model.named_parameters() gives"
            )
        names = [name for name, _ in named]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"parameter names in named_parameters must be unique; found more than once: {twice}")
        named = list({parameter: (name, parameter) for name, parameter in reversed(named)}.values())[::-1]
        unnamed = own.keys() - {parameter for _, parameter in named}
        if unnamed:
            raise ValueError(
                "named_parameters was specified, but one or more model parameters were not named: "
                + ", ".join(sorted(f"group {own[p].split('.')[1]}, number {own[p].split('.')[2]}" for p in unnamed))
            )
    return [(name, parameter) for name, parameter in named if parameter in own and parameter.requires_grad]


def _groups(groups, num_groups, named):
    """The user's grouping as lists of indices into `named`, or None."""
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups` and will be removed", DeprecationWarning,
                      stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError(f"groups should be a non-negative integer or a list of lists of parameters, not {groups}")
        indices = list(range(len(named)))
        return [part for part in split_list(indices, groups) if part] if groups else None
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError("groups should be a non-negative integer or a list of lists of parameters")
    index_of = {parameter: index for index, (_, parameter) in enumerate(named)}
    listed = [parameter for group in groups for parameter in group]
    if len(set(listed)) < len(listed):
        raise ValueError("a parameter can only appear once in groups")
    return [[index_of[parameter] for parameter in group if parameter in index_of] for group in groups]


def _adasum(optimizer, compression, backward_passes_per_step, process_set, algorithm):
    if algorithm is not None:
        raise ValueError(f"op=Adasum combines steps, not gradients: it does not go with algorithm={algorithm!r}")
    collectives.check_adasum(process_set.process_set_id, basics.size())
    cls = type(type(optimizer).__name__, (DistributedAdasum, type(optimizer)), {"__doc__": type(optimizer).__doc__})
    return cls(optimizer, compression, backward_passes_per_step)


def DistributedOptimizer(optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1,
                         op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False,
                         process_set=global_process_set, algorithm=None):
    """Wraps a torch optimizer so that gradients are reduced over the ranks while the backward pass computes them.

    All ranks of the set wrap their optimizers in the same order, and take the first steps with them in the same order.

    Args:
        optimizer: any torch.optim.Optimizer. The result's class derives from its class and has its name;
            hyperparameters and state are shared with it, and only the result should be used from then on.
        named_parameters: `model.named_parameters()`; must name all parameters of the optimizer. Others are ignored.
        compression: what is done to gradients before they travel: Compression.none, Compression.fp16 or your own.
        backward_passes_per_step: gradients are summed locally over so many backward passes, then travel. A step()
            before the last of them sends what there is. See also no_sync().
        op: Average, Sum, or Adasum (torch/adasum.py: steps are combined instead of gradients; `groups`,
            `sparse_as_dense` and `algorithm` do not apply).
        gradient_predivide_factor: f: gradients are divided by f before the sum and multiplied by f / size after it.
        num_groups: deprecated, see groups.
        groups: number of groups, or lists of parameters, that travel in one operation each. None: buckets of about
            BAGUA_DEFAULT_BUCKET_SIZE bytes (10 MiB).
        sparse_as_dense: sparse gradients travel as dense ones; else their entries are gathered. What is sparse is
            settled in the first step, by all ranks together; a gradient that becomes sparse later travels as dense.
        process_set: the ranks that reduce; others step locally.
        algorithm: how gradients travel: a registered name such as "bytegrad", an Algorithm, or its class. None: the
            name in BAGUA_ALGORITHM, else "gradient_allreduce". Relaxed algorithms apply to dense floating gradients.
    Raises:
        ValueError: a wrong argument; an unknown algorithm's sentence lists the known ones. Nothing was changed.
        NotImplementedError: op=Adasum on a process set, or over a number of ranks that is no power of 2.
    """
    if isinstance(optimizer, (_Distributed, DistributedAdasum)):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    _check_passes(backward_passes_per_step)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op={op!r}: gradients are combined by hvd.Average or hvd.Sum")
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not registered: pass it to hvd.init(process_sets=[...]) first")
    named = _named(optimizer, named_parameters)
    if op == Adasum and (basics.size() > 1 or basics.runtime.options.elastic):
        return _adasum(optimizer, compression, backward_passes_per_step, process_set, algorithm)
    # Adasum of one rank is the gradient itself, and so is its average.
    chosen = algorithms.choose(algorithm, average=op != Sum)
    grouped = _groups(groups, num_groups, named)
    cls = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {"__doc__": type(optimizer).__doc__})
    return cls(optimizer, named, compression, backward_passes_per_step, op, gradient_predivide_factor, grouped,
               sparse_as_dense, process_set, chosen)
