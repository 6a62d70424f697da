"""The strategies of Lightning's Trainer and Fabric: DDP's, but optimizers are wrapped instead of the model.

torch.distributed remains for metrics, `sync_dist` and signals; bagua_hvd sends gradients and weights.
"""
import contextlib
import weakref
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from bagua_hvd.lightning.environment import BaguarunEnvironment, of_fabric, of_pytorch
from bagua_hvd.torch.distributed import process_set_of  # registers the backend, too
from bagua_hvd.torch.functions import broadcast_parameters, consensus
from bagua_hvd.torch.optimizer import DistributedOptimizer
from bagua_hvd.torch.wrapping import gathered


def same_weights(module: torch.nn.Module) -> None:
    """Broadcasts rank 0's parameters and buffers; like DDPStrategy, not the results of get_extra_state()."""
    broadcast_parameters({name: value for name, value in module.state_dict().items() if torch.is_tensor(value)}, 0)


def no_sync(optimizers: Any) -> contextlib.ExitStack:
    """Enters no_sync() of all optimizers."""
    stack = contextlib.ExitStack()
    for optimizer in optimizers:
        stack.enter_context(optimizer.no_sync())
    return stack


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
    algorithms = {id(each.algorithm): each.algorithm for each in optimizers if each.reducer is not None}.values()
    with contextlib.ExitStack() as stack:
        for algorithm in algorithms:
            if algorithm.asynchronous:
                algorithm.abort()
                stack.callback(algorithm.resume)
        if any(algorithm.models_differ for algorithm in algorithms):
            stack.enter_context(consensus(module))
        yield


_DDPStrategy: Any = of_pytorch("strategies").DDPStrategy
_FabricDDPStrategy: Any = of_fabric("strategies").DDPStrategy
_BackwardSyncControl: Any = of_fabric("strategies.strategy")._BackwardSyncControl
LightningOptimizer: Any = of_pytorch("core.optimizer").LightningOptimizer
_Base: Any = object         # at run time a DDPStrategy of Lightning follows


class _OfOptimizers(_Base):
    """The part of both strategies that wraps optimizers and starts the runtime; see BaguaStrategy."""

    def __init__(self, algorithm: Any = None, optimizer_options: dict | None = None, cluster_environment: Any = None,
                 **kwargs: Any) -> None:
        if cluster_environment is None and BaguarunEnvironment.detect():        # Lightning does not detect it
            cluster_environment = BaguarunEnvironment()
        super().__init__(cluster_environment=cluster_environment, **kwargs)
        options = sorted(self._ddp_kwargs)
        if getattr(self, "_ddp_comm_hook", None) is not None:
            options.append("ddp_comm_hook")
        if options:
            raise ValueError(f"{type(self).__name__} does not use DistributedDataParallel, so its options have no "
                             f"effect: remove {', '.join(options)}. Unused parameters need no option; use algorithm= "
                             "instead of a hook")
        self._algorithm = algorithm
        self._optimizer_options = optimizer_options or {}

    def _connect(self, connect: Any) -> None:
        """Makes Lightning's process group by connect(), and starts the runtime among its ranks.

        Raises:
            ValueError: baguarun's ranks are not those that Lightning expects.
        """
        environment = self.cluster_environment
        if isinstance(environment, BaguarunEnvironment):        # Lightning calls it only for its own choice
            environment.validate_settings(self.num_processes, self.num_nodes)
        connect()
        process_set_of()

    def _wrap(self, optimizer: Any, module_names: Any) -> Any:
        """Wraps an optimizer in a DistributedOptimizer.

        module_names: parameter -> its name in its module; if one is missing, or two are equal, as in two modules of
            Fabric, all are named by position.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        named = None
        names = {module_names.get(parameter) for parameter in parameters}
        if None not in names and len(names) == len(parameters):
            named = [(module_names[parameter], parameter) for parameter in parameters]
        return DistributedOptimizer(optimizer, named_parameters=named, algorithm=self._algorithm,
                                    **self._optimizer_options)

    def _state_of(self, optimizer: Any, otherwise: Any) -> Any:
        """The state_dict() of a wrapped optimizer with the algorithm's state of every rank, or otherwise(optimizer)."""
        if hasattr(optimizer, "reducer"):
            return gathered(optimizer.state_dict(), optimizer.process_set)
        return otherwise(optimizer)


class BaguaStrategy(_OfOptimizers, _DDPStrategy):
    """Data parallel training with an algorithm of bagua_hvd.

    Processes are started as by "ddp": by the Trainer, torchrun, Slurm, or baguarun.

    Args:
        algorithm: a name, an Algorithm or its class; None: BAGUA_ALGORITHM, else "gradient_allreduce".
        optimizer_options: further arguments of hvd.DistributedOptimizer, such as {"compression": hvd.Compression.fp16}.
        kwargs: of Lightning's DDPStrategy. process_group_backend="bagua": torch.distributed uses bagua_hvd, too.
    Raises:
        ValueError: an option of DistributedDataParallel is given, which is not used.
    """

    strategy_name = "bagua"
    optimizers: Any             # a property

    _evaluation: contextlib.ExitStack | None = None

    def setup_distributed(self) -> None:
        self._connect(super().setup_distributed)

    def configure_ddp(self) -> None:
        """Leaves the model as it is, and gives all ranks rank 0's weights."""
        same_weights(self.lightning_module)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        names = {parameter: name for name, parameter in self.lightning_module.named_parameters()}
        wrapped: list = []
        for optimizer in self.optimizers:
            new = self._wrap(optimizer, names)
            for config in self.lr_scheduler_configs:
                if getattr(config.scheduler, "optimizer", None) is optimizer:
                    config.scheduler.optimizer = new
            wrapped.append(new)
        self.optimizers = wrapped

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator:
        """Within it, gradients accumulate locally."""
        with no_sync(self.optimizers):
            yield

    # ----------------------------------------------------------------------------------- evaluation and checkpoints

    def _wrapped(self) -> list:
        return [optimizer for optimizer in self.optimizers if hasattr(optimizer, "reducer")]

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._wrapped():
            self._evaluation = contextlib.ExitStack()
            self._evaluation.enter_context(consensus_scope(self.lightning_module, self._wrapped()))

    def on_validation_end(self) -> None:
        self._end_evaluation()
        super().on_validation_end()

    def _end_evaluation(self) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            evaluation.close()

    def lightning_module_state_dict(self) -> dict:
        """The model's state; the mean if models differ between ranks. Collective, as saving is in Lightning."""
        if not self._wrapped() or self._evaluation is not None:
            return super().lightning_module_state_dict()
        with consensus_scope(self.lightning_module, self._wrapped()):
            return cloned(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Any) -> dict:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return self._state_of(optimizer, super().optimizer_state)

    def teardown(self) -> None:
        """Ends communication, in the background and by backward passes over the model.

        The ranks leave the trainer together, unless one has raised.
        """
        self._end_evaluation()
        for optimizer in self._wrapped():
            if optimizer.reducer is None:
                continue
            optimizer._backward.close()
            if optimizer.algorithm.asynchronous and not self.lightning_module.trainer.interrupted:
                optimizer.algorithm.abort()
        super().teardown()


class _NoSync(_BackwardSyncControl):
    """fabric.no_backward_sync(module): gradients of the module's parameters accumulate locally."""

    def __init__(self, optimizers: Any) -> None:
        self._optimizers = optimizers

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> Any:
        if not enabled:
            return contextlib.nullcontext()
        own = set(module.parameters())
        return no_sync(optimizer for optimizer in self._optimizers
                              if any(p in own for group in optimizer.param_groups for p in group["params"]))


class BaguaFabricStrategy(_OfOptimizers, _FabricDDPStrategy):
    """Data parallel training with an algorithm of bagua_hvd: `Fabric(strategy=BaguaFabricStrategy("bytegrad"))`.

    Args:
        algorithm, optimizer_options: as for BaguaStrategy. kwargs: of Fabric's DDPStrategy.
    Raises:
        ValueError: an option of DistributedDataParallel is given, which is not used.
    """

    def __init__(self, algorithm: Any = None, optimizer_options: dict | None = None, cluster_environment: Any = None,
                 **kwargs: Any) -> None:
        super().__init__(algorithm, optimizer_options, cluster_environment, **kwargs)
        # Modules and optimizers that the program has dropped must not live on. Keys are in the order of insertion.
        self._names: Any = WeakTensorKeyDictionary()
        self._wrapped: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._backward_sync_control = _NoSync(self._wrapped)

    def _setup_distributed(self) -> None:
        self._connect(super()._setup_distributed)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Returns the module itself, with rank 0's weights."""
        same_weights(module)
        self._names.update({parameter: name for name, parameter in module.named_parameters()})
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Returns its DistributedOptimizer. Set up the modules first."""
        wrapped = self._wrap(optimizer, self._names)
        self._wrapped[wrapped] = None
        return wrapped

    def get_optimizer_state(self, optimizer: Any) -> dict:
        return self._state_of(optimizer, super().get_optimizer_state)

    def get_module_state_dict(self, module: torch.nn.Module) -> dict:
        """The module's state; the mean if modules differ between ranks. Collective, as fabric.save() is."""
        with consensus_scope(module, self._wrapped):
            return cloned(super().get_module_state_dict(module))
