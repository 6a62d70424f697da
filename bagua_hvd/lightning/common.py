"""Common part of the strategies of the Trainer and of Fabric."""
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from bagua_hvd.lightning.environment import BaguarunEnvironment
from bagua_hvd.torch.functions import broadcast_parameters
from bagua_hvd.torch.optimizer import DistributedOptimizer
from bagua_hvd.torch.wrapping import gathered


def environment_of(given: Any) -> Any:
    """The ClusterEnvironment for a strategy, given one or None: Lightning does not detect baguarun."""
    return BaguarunEnvironment() if given is None and BaguarunEnvironment.detect() else given


def refuse(strategy: Any, options: Iterable[str]) -> None:
    """Raises ValueError if there are options of DistributedDataParallel."""
    if given := ", ".join(sorted(options)):
        raise ValueError(f"{type(strategy).__name__} does not use DistributedDataParallel, so its options have no "
                         f"effect: remove {given}. Unused parameters need no option; use algorithm= instead of a hook")


def before_connecting(strategy: Any) -> None:
    """Checks before Lightning makes its process group.

    Raises:
        ValueError: baguarun's ranks are not those that Lightning expects.
    """
    environment = strategy.cluster_environment
    if isinstance(environment, BaguarunEnvironment):        # Lightning calls it only for its own choice
        environment.validate_settings(strategy.num_processes, strategy.num_nodes)


def same_weights(module: torch.nn.Module) -> None:
    """Broadcasts rank 0's parameters and buffers; like DDPStrategy, not the results of get_extra_state()."""
    broadcast_parameters({name: value for name, value in module.state_dict().items() if torch.is_tensor(value)}, 0)


def wrap(optimizer: Any, module_names: Any, algorithm: Any, options: dict) -> Any:
    """Wraps an optimizer in a DistributedOptimizer.

    Args:
        module_names: parameter -> its name in its module; if one is missing, or two are equal, as in two modules of
            Fabric, all are named by position.
        options: further arguments of DistributedOptimizer.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    named = None
    names = {module_names.get(parameter) for parameter in parameters}
    if None not in names and len(names) == len(parameters):
        named = [(module_names[parameter], parameter) for parameter in parameters]
    return DistributedOptimizer(optimizer, named_parameters=named, algorithm=algorithm, **options)


def no_sync(optimizers: Any) -> contextlib.ExitStack:
    """Enters no_sync() of all optimizers."""
    stack = contextlib.ExitStack()
    for optimizer in optimizers:
        stack.enter_context(optimizer.no_sync())
    return stack


def state_of(optimizer: Any) -> dict:
    """The optimizer's state_dict with the algorithm's state of every rank. Collective."""
    return gathered(optimizer.state_dict(), optimizer.process_set)


def cloned(state: dict) -> dict:
    """A module's state with copies of its tensors."""
    return {name: value.clone() if torch.is_tensor(value) else value for name, value in state.items()}


@contextlib.contextmanager
def consensus_scope(module: torch.nn.Module, optimizers: Any) -> Iterator[None]:
    """Context for models that differ between ranks by design: within it, all of them have the mean.

    Background communication stops. Collective at both ends; does nothing if the models are equal.

    Args:
        module: the model. optimizers: wrapped ones.
    """
    from bagua_hvd.torch.functions import consensus

    algorithms = {id(each.algorithm): each.algorithm for each in optimizers if each.reducer is not None}.values()
    with contextlib.ExitStack() as stack:
        for algorithm in algorithms:
            if algorithm.asynchronous:
                algorithm.abort()
                stack.callback(algorithm.resume)
        if any(algorithm.models_differ for algorithm in algorithms):
            stack.enter_context(consensus(module))
        yield
