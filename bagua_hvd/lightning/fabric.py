"""The strategy of Lightning's Fabric."""
import contextlib
import weakref
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from bagua_hvd.lightning import common
from bagua_hvd.lightning.packages import of_fabric
from bagua_hvd.torch.distributed import process_set_of  # registers the backend, too

DDPStrategy: Any = of_fabric("strategies").DDPStrategy
_BackwardSyncControl: Any = of_fabric("strategies.strategy")._BackwardSyncControl


class _NoSync(_BackwardSyncControl):
    """fabric.no_backward_sync(module): gradients of the module's parameters accumulate locally."""

    def __init__(self, optimizers: Any) -> None:
        self._optimizers = optimizers

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> Any:
        if not enabled:
            return contextlib.nullcontext()
        own = set(module.parameters())
        return common.no_sync(optimizer for optimizer in self._optimizers
                              if any(p in own for group in optimizer.param_groups for p in group["params"]))


class BaguaFabricStrategy(DDPStrategy):
    """Data parallel training with an algorithm of bagua_hvd: `Fabric(strategy=BaguaFabricStrategy("bytegrad"))`.

    Args:
        algorithm, optimizer_options: as for BaguaStrategy. kwargs: of Fabric's DDPStrategy.
    Raises:
        ValueError: an option of DistributedDataParallel is given, which is not used.
    """

    def __init__(self, algorithm: Any = None, optimizer_options: dict | None = None, cluster_environment: Any = None,
                 **kwargs: Any) -> None:
        super().__init__(cluster_environment=common.environment_of(cluster_environment), **kwargs)
        common.refuse(self, self._ddp_kwargs)
        self._algorithm = algorithm
        self._optimizer_options = optimizer_options or {}
        # Modules and optimizers that the program has dropped must not live on. Keys are in the order of insertion.
        self._names: Any = WeakTensorKeyDictionary()
        self._wrapped: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._backward_sync_control = _NoSync(self._wrapped)

    def _setup_distributed(self) -> None:
        common.before_connecting(self)
        super()._setup_distributed()
        process_set_of()            # starts the runtime among these ranks

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Returns the module itself, with rank 0's weights."""
        common.same_weights(module)
        self._names.update({parameter: name for name, parameter in module.named_parameters()})
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Returns its DistributedOptimizer. Set up the modules first."""
        wrapped = common.wrap(optimizer, self._names, self._algorithm, self._optimizer_options)
        self._wrapped[wrapped] = None
        return wrapped

    def get_optimizer_state(self, optimizer: Any) -> dict:
        return common.state_of(optimizer) if hasattr(optimizer, "reducer") else super().get_optimizer_state(optimizer)

    def get_module_state_dict(self, module: torch.nn.Module) -> dict:
        """The module's state; the mean if modules differ between ranks. Collective, as fabric.save() is."""
        with common.consensus_scope(module, self._wrapped):
            return common.cloned(super().get_module_state_dict(module))
