"""The strategy of Lightning's Trainer: its DDP strategy, with wrapped optimizers instead of DistributedDataParallel.

torch.distributed remains for metrics, `sync_dist` and signals; bagua_hvd sends gradients and weights.
"""
import contextlib
from collections.abc import Generator
from typing import Any

from bagua_hvd.lightning import common
from bagua_hvd.lightning.packages import of_pytorch
from bagua_hvd.torch.distributed import process_set_of  # registers the backend, too

DDPStrategy: Any = of_pytorch("strategies").DDPStrategy
LightningOptimizer: Any = of_pytorch("core.optimizer").LightningOptimizer


class BaguaStrategy(DDPStrategy):
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

    def __init__(self, algorithm: Any = None, optimizer_options: dict | None = None, cluster_environment: Any = None,
                 **kwargs: Any) -> None:
        super().__init__(cluster_environment=common.environment_of(cluster_environment), **kwargs)
        common.refuse(self, [*self._ddp_kwargs, *(["ddp_comm_hook"] if self._ddp_comm_hook is not None else [])])
        self._algorithm = algorithm
        self._optimizer_options = optimizer_options or {}
        self._evaluation: contextlib.ExitStack | None = None

    def setup_distributed(self) -> None:
        common.before_connecting(self)
        super().setup_distributed()
        process_set_of()            # starts the runtime among these ranks

    def configure_ddp(self) -> None:
        """Leaves the model as it is, and gives all ranks rank 0's weights."""
        common.same_weights(self.lightning_module)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        names = {parameter: name for name, parameter in self.lightning_module.named_parameters()}
        wrapped: list = []
        for optimizer in self.optimizers:
            new = common.wrap(optimizer, names, self._algorithm, self._optimizer_options)
            for config in self.lr_scheduler_configs:
                if getattr(config.scheduler, "optimizer", None) is optimizer:
                    config.scheduler.optimizer = new
            wrapped.append(new)
        self.optimizers = wrapped

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator:
        """Within it, gradients accumulate locally."""
        with common.no_sync(self.optimizers):
            yield

    # ----------------------------------------------------------------------------------- evaluation and checkpoints

    def _wrapped(self) -> list:
        return [optimizer for optimizer in self.optimizers if hasattr(optimizer, "reducer")]

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._wrapped():
            self._evaluation = contextlib.ExitStack()
            self._evaluation.enter_context(common.consensus_scope(self.lightning_module, self._wrapped()))

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
        with common.consensus_scope(self.lightning_module, self._wrapped()):
            return common.cloned(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Any) -> dict:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return common.state_of(optimizer) if hasattr(optimizer, "reducer") else super().optimizer_state(optimizer)

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
