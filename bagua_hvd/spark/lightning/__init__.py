"""TorchEstimator for a LightningModule: runs Lightning's Trainer on the rows of a DataFrame, by bagua_hvd's strategy.

    model = TorchEstimator(num_proc=4, store=Store.create("/shared"), model=module, feature_cols=["features"],
                           label_cols=["label"], epochs=3).fit(df)
    model.transform(df)                 # adds label__output

Batches are dicts of tensors by column name.
"""
import io

from bagua_hvd.spark.common.params import ESTIMATOR, with_params
from bagua_hvd.spark.torch import OfTorch, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]

_PARAMS = {
    **ESTIMATOR,
    "trainer_args": (None, "further keywords of lightning.pytorch.Trainer"),
    "logger": (False, "logger of the Trainer"),
}


def _train(module, task):
    """Runs on a rank: returns the logged metrics and, on rank 0, the parameters."""
    import torch

    import bagua_hvd.torch as hvd
    from bagua_hvd.lightning import BaguaStrategy
    from bagua_hvd.lightning.environment import of_pytorch

    hvd.init()
    rows, validation = task.rows(hvd.rank(), hvd.size())

    class Epochs(torch.utils.data.IterableDataset):
        """The batches of consecutive epochs."""

        def __init__(self, batches):
            self._batches = batches
            self._epoch = -1

        def __iter__(self):
            self._epoch += 1        # before the loop: a Trainer with a limit of batches does not reach its end
            for batch in self._batches(self._epoch):
                yield {name: torch.tensor(array) for name, array in batch.items()}

    def loader(batches):
        return torch.utils.data.DataLoader(Epochs(batches), batch_size=None)

    gpu = all(hvd.allgather_object(task.use_gpu and torch.cuda.device_count() >= hvd.local_size()))
    trainer = of_pytorch("").Trainer(**{
        "strategy": BaguaStrategy(task.algorithm, {"compression": task.gradient_compression} if
                                  task.gradient_compression else None),
        "accumulate_grad_batches": task.backward_passes_per_step,
        "accelerator": "gpu" if gpu else "cpu",
        "devices": hvd.local_size(), "num_nodes": hvd.cross_size(), "max_epochs": task.epochs,
        "limit_train_batches": task.steps(rows), "limit_val_batches": 1.0 if validation else 0,
        "num_sanity_val_steps": 0, "logger": task.logger, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "callbacks": list(task.callbacks), **(task.trainer_args or {})})
    trainer.fit(module, loader(lambda epoch: task.epoch(rows, epoch)),
                loader(lambda epoch: task.validation_batches(validation)) if validation else None)
    history = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if any(optimizer.algorithm.models_differ for optimizer in trainer.optimizers):
        hvd.consensus(module)
    content = io.BytesIO()
    if hvd.rank() == 0:
        torch.save({name: value.cpu() for name, value in module.state_dict().items()}, content)
    return {"history": history, "content": content.getvalue()}


@with_params(_PARAMS)
class TorchEstimator(OfTorch):
    """Parameters as keywords; see bagua_hvd.spark.common.params and this module's for their meanings.

    transform() calls the module with the feature columns as tensors: it needs a forward().
    """

    _trains = staticmethod(_train)
