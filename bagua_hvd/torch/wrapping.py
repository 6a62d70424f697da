"""The base of wrapped torch optimizers: their class, parameter names, and algorithm state in the state_dict."""
import inspect
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from bagua_hvd.core import objects
from bagua_hvd.job import basics
from bagua_hvd.job.process_sets import context_and_id
from bagua_hvd.training.state import from_bytes, to_bytes

# At run time the optimizer's own class, which need not be torch's, follows this mixin and has the methods.
if TYPE_CHECKING:
    from torch.optim import Optimizer as _Optimizer
else:
    _Optimizer = object


class Wrapped(_Optimizer):
    """The mixin that DistributedOptimizer puts before the class of the given optimizer; subclasses communicate.

    Parameter groups and state are shared with the given optimizer, also after load_state_dict(): LR schedulers may
    refer to either. The class's own __init__ is not called, since its arguments are unknown. Methods patched on the
    given optimizer, such as an LR scheduler's step, stay there.

    Args:
        optimizer: the given one. named: (name, parameter) pairs of all its parameters.
    Attributes:
        reducer: its Reducer, or None. algorithm: its Algorithm; None with op=Adasum.
    """

    reducer: Any        # no class attribute: a proxy of the class must ask the optimizer
    algorithm: Any

    def __init__(self, optimizer: torch.optim.Optimizer, named: Any) -> None:
        own = type(self).__mro__[1]
        self.__dict__.update({name: value for name, value in optimizer.__dict__.items() if not hasattr(own, name)})
        self.__dict__["param_groups"] = optimizer.param_groups
        self.reducer = self.algorithm = None
        self._given = optimizer
        self._parameter_names = {parameter: name for name, parameter in named}

    # GradScaler.unscale_(optimizer) looks for infinities; before that it only reads this property. So if gradients stay
    # local, the ranks agree on an overflow here; otherwise one would skip the step and the others wait for it. Other
    # readers must not communicate: a rank that logs its learning rate must not wait for the others.
    # docs/decisions/frontends.md
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. When a GradScaler reads them, gradients are synchronized, as in step()."""
        reader = sys._getframe(1)
        if reader.f_code.co_name == "_unscale_grads_" or reader.f_globals.get("__name__", "").endswith("grad_scaler"):
            self._complete(agree=True)
            self._unscaled_by(reader)
        try:
            return self.__dict__["param_groups"]
        except KeyError:        # a proxy of this class, which forwards attributes that it lacks
            raise AttributeError("param_groups") from None

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = self._given.param_groups = groups

    def __setstate__(self, state):
        # load_state_dict() ends here, with new groups and a new state.
        super().__setstate__(state)
        self._given.__dict__.update(param_groups=self.__dict__["param_groups"], state=self.state)

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled, because the other ranks would not know of the copy: "
            "save its state_dict(), or copy the optimizer before it is wrapped"
        )

    def _complete(self, agree):
        """Makes gradients those that the step will use. agree: if any rank has an overflow, all skip the step."""
        raise NotImplementedError

    def _unscaled_by(self, frame):
        """Called before the GradScaler whose method the frame runs unscales the gradients."""

    def no_sync(self) -> Any:
        """Within it, backward passes only add to the local gradients: nothing is sent or counted.

            for i, batch in enumerate(batches):
                with contextlib.nullcontext() if i % k == k - 1 else optimizer.no_sync():
                    loss_of(batch).backward()
                if i % k == k - 1:
                    optimizer.step()
                    optimizer.zero_grad()

        is like backward_passes_per_step=k, with a k that may change: the first backward pass after it sends the sum of
        all. With backward_passes_per_step=m, m passes outside of it make a window, as usual, and gradients accumulated
        within it are sent with them. A step() that follows it directly sends the sum so far.

        Use it also for a backward pass that touches these gradients only as a side effect, as a generator's does with
        the discriminator's: `with discriminator_optimizer.no_sync(): generator_loss.backward()`.

        Does nothing with op=Adasum, which communicates in step() only.

        Raises:
            RuntimeError: from step() or synchronize() within it, if there is anything to send.
        """
        return nullcontext() if self.reducer is None else self.reducer.no_sync()

    def _count_step(self):
        """Tells LR schedulers that were made before wrapping that the optimizer makes steps."""
        self._given._opt_called = True


def wrapped_class(optimizer: torch.optim.Optimizer, mixin: Any) -> Any:
    """The class of a wrapped optimizer: it has the name of the given one, and "horovod" in its str().

    Libraries recognize Horovod's optimizers by the latter.
    """
    cls = type(optimizer)
    return type(cls.__name__, (mixin, cls), {
        "__doc__": cls.__doc__, "__module__": mixin.__module__, "__qualname__": f"horovod.{cls.__name__}"})


def parameters_by_name(optimizer: torch.optim.Optimizer, named_parameters: Any) -> list:
    """(name, parameter) of all parameters of the optimizer.

    In the order of named_parameters if given: the model's, equal on all ranks even if the optimizer's is not.
    """
    own = {
        parameter: f"noname.{g}.{i}"
        for g, group in enumerate(optimizer.param_groups) for i, parameter in enumerate(group["params"])
    }
    if named_parameters is None:
        pairs = [(name, parameter) for parameter, name in own.items()]
    else:
        if inspect.isroutine(named_parameters):
            raise ValueError("named_parameters is a function: call it, as in model.named_parameters()")
        pairs = list(named_parameters)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError(
                "named_parameters should be a sequence of tuples (name, parameter), as model.named_parameters() gives"
            )
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"parameter names in named_parameters must be unique; found more than once: {twice}")
        pairs = list({parameter: (name, parameter) for name, parameter in reversed(pairs)}.values())[::-1]
        unnamed = own.keys() - {parameter for _, parameter in pairs}
        if unnamed:
            raise ValueError(
                "named_parameters was specified, but one or more model parameters were not named: "
                + ", ".join(sorted(f"group {own[p].split('.')[1]}, number {own[p].split('.')[2]}" for p in unnamed))
            )
    return [(name, parameter) for name, parameter in pairs if parameter in own]


# ------------------------------------------------------------------- the algorithm's state in a state_dict ----


# The only key that DistributedOptimizer adds to a state_dict, and only with an algorithm that may have state.
STATE_KEY = "bagua_hvd"
_OF_RANKS = "of_ranks"


def with_kept(state: dict, kept: dict) -> dict:
    """A copy of an optimizer's state_dict(), with the state of its algorithm in the first parameter group, as bytes.

    Code that rebuilds a state_dict from its groups and states, such as torch.distributed.checkpoint, keeps it there,
    and can load it into an optimizer that has made no step.
    """
    first, *others = state["param_groups"]
    return {**state, "param_groups": [{**first, STATE_KEY: to_bytes(kept)}, *others]}


def kept_in(state: dict) -> dict:
    """The state that with_kept() put into a state_dict; {} if none."""
    kept = state["param_groups"][0].get(STATE_KEY)
    return from_bytes(kept) if kept else {}


def gathered(state: dict, process_set: Any) -> dict:
    """An optimizer's state_dict() with the algorithm state of every rank instead of only this one's. Collective.

    Args:
        state: not changed; returned as it is if no rank has algorithm state. If the algorithm never has any, which is
            equal on all ranks, nothing is sent.
        process_set: the optimizer's.
    """
    if STATE_KEY not in state["param_groups"][0] or basics.size() == 1 or not process_set.included():
        return state
    context, id = context_and_id(process_set)
    of_ranks = objects.allgather_object(context, kept_in(state), "rank_states", id)
    return with_kept(state, {_OF_RANKS: of_ranks}) if any(of_ranks) else state


def of_this_rank(state: dict, process_set: Any) -> dict:
    """The algorithm state for this rank in a state_dict: its own, or rank 0's if it has none."""
    kept = kept_in(state)
    of_ranks = kept.get(_OF_RANKS)
    if of_ranks is None:
        return kept
    place = process_set.rank() if process_set.included() else 0
    own: dict = of_ranks[place if place < len(of_ranks) else 0]
    return own


def places(kept: dict, names: list, unnamed: dict) -> list:
    """The index among `names` of each parameter that a state names.

    Args:
        names: of the optimizer's parameters. unnamed: name in a state that was saved without names -> one of these.
    Raises:
        ValueError: a parameter of the state is not among them.
    """
    index_of = {name: index for index, name in enumerate(names)}
    found = [index_of.get(name, index_of.get(unnamed.get(name))) for name in kept["names"]]
    if None in found:
        missing = kept["names"][found.index(None)]
        raise ValueError(
            f"the checkpoint has state of {kept['algorithm']} for parameter {missing}, and this optimizer has no "
            f"parameter of this name: pass the named_parameters that it was saved with, or delete "
            f'"{STATE_KEY}" from the first of its param_groups, and the algorithm starts without its state'
        )
    return found
