"""TorchEstimator: trains a PyTorch model on the rows of a DataFrame, with bagua_hvd's optimizer.

    model = TorchEstimator(num_proc=4, store=Store.create("/shared"), model=net, optimizer=SGD(net.parameters(), 0.1),
                           loss=cross_entropy, feature_cols=["features"], label_cols=["label"], epochs=3).fit(df)
    model.transform(df)                 # adds label__output
"""
import functools
import io
from collections.abc import Callable
from typing import Any

from bagua_hvd.spark.common.estimator import HorovodEstimator, HorovodModel
from bagua_hvd.spark.common.params import ESTIMATOR, MODEL, with_params

_PARAMS = {
    **ESTIMATOR,
    "optimizer": (None, "a torch.optim.Optimizer of the model's parameters"),
    "loss": (None, "a function of output and label, or a list of them, one for each label"),
    "loss_weights": (None, "factors of several losses; None: equal ones"),
    "metrics": ((), "functions of output and label (lists of them, if there are several labels), averaged"),
}


@with_params(MODEL)
class TorchModel(HorovodModel):
    """A trained torch.nn.Module: getModel() returns it, getHistory() a list with a dict for each epoch."""

    def predictor(self) -> Any:
        module = self.value("model")

        def make():
            import torch

            module.eval()

            def predict(features):
                with torch.no_grad():
                    outputs = module(*(torch.tensor(array) for array in features))
                return [output.numpy() for output in (outputs if isinstance(outputs, (tuple, list)) else [outputs])]

            return predict

        return make


class OfTorch(HorovodEstimator):
    """An estimator of a torch.nn.Module.

    Attributes:
        _trains: function of (model, Task), called on each rank: returns the history and, on rank 0, the parameters.
    """

    _trains: Callable[[Any, Any], dict[str, Any]]

    def job(self) -> tuple[Any, dict[str, str]]:
        return functools.partial(self._trains, self.value("model")), {}

    def check(self, sample: Any) -> None:
        refuse_integers(self.value("model"), {name: sample[name] for name in self.value("feature_cols")})

    def made(self, result: Any, run_id: str) -> TorchModel:
        return TorchModel(
            result["history"], model=loaded(self.value("model"), result["content"]), run_id=run_id,
            **{name: self.value(name) for name in ("feature_cols", "label_cols", "input_shapes")})


def refuse_integers(model: Any, features: dict[str, Any]) -> None:
    """ValueError if the model rejects these columns, but would accept them with integers converted to floats.

    Args:
        features: {column: array of one row}.
    """
    import copy

    import torch

    whole = [name for name, array in features.items() if array.dtype.kind != "f"]
    if not whole:
        return
    model = copy.deepcopy(model).cpu().eval()

    def refusal(dtype):
        try:
            with torch.no_grad():
                model(*(torch.tensor(array, dtype=dtype) for array in features.values()))
        except Exception as error:
            return error

    if (error := refusal(None)) is not None and refusal(torch.float32) is None:
        raise ValueError(f"the model takes no integers ({error}), as they are in the columns {', '.join(whole)}: cast "
                         "them to double, or to arrays of double")


def loaded(model: Any, content: bytes) -> Any:
    """A copy of the model with the parameters in `content`, on the CPU."""
    import copy

    import torch

    trained = copy.deepcopy(model).cpu()
    trained.load_state_dict(torch.load(io.BytesIO(content), map_location="cpu"))
    return trained


def _train(model, task):
    """Runs on a rank: returns the history and, on rank 0, the parameters."""
    import torch

    import bagua_hvd.torch as hvd

    hvd.init()
    # Collectives do not mix CPUs and GPUs.
    gpu = all(hvd.allgather_object(task.use_gpu and hvd.local_rank() < torch.cuda.device_count()))
    device = torch.device("cuda", hvd.local_rank()) if gpu else "cpu"
    model.to(device)
    compression = {"compression": task.gradient_compression} if task.gradient_compression else {}
    optimizer = hvd.DistributedOptimizer(
        task.optimizer, model.named_parameters(), algorithm=task.algorithm,
        backward_passes_per_step=task.backward_passes_per_step, **compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = task.loss if isinstance(task.loss, (list, tuple)) else [task.loss]
    weights = task.loss_weights or [1.0] * len(losses)
    rows, validation = task.rows(hvd.rank(), hvd.size())

    def measure(batch):
        """(loss, {metric: value}) of a batch."""
        features = [torch.tensor(batch[name], device=device) for name in task.feature_cols]
        labels = [torch.tensor(batch[name], device=device) for name in task.label_cols]
        outputs = model(*features)
        given = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        loss = sum(weight * function(output, label)
                   for weight, function, output, label in zip(weights, losses, given, labels, strict=True))
        arguments = (given, labels) if len(labels) > 1 else (given[0], labels[0])
        metrics = {getattr(metric, "__name__", f"metric_{i}"): float(metric(*arguments))
                   for i, metric in enumerate(task.metrics)}
        return loss, metrics

    def averages(measured):
        """Means over all batches of all ranks; every rank has equally many batches."""
        means = {name: sum(each[name] for each in measured) / len(measured) for name in measured[0]}
        return {name: hvd.allreduce(torch.tensor(mean), name=f"mean.{name}").item() for name, mean in means.items()}

    def update():
        optimizer.step()
        optimizer.zero_grad()

    history = []
    for epoch in range(task.epochs):
        model.train()
        measured = []
        for batch in task.epoch(rows, epoch):
            loss, metrics = measure(batch)
            loss.backward()
            measured.append({"loss": loss.item(), **metrics})
            if len(measured) % task.backward_passes_per_step == 0:
                update()
        if len(measured) % task.backward_passes_per_step:
            update()        # for the remaining batches
        entry = {"epoch": epoch, "train": averages(measured)}
        if optimizer.algorithm.asynchronous:
            optimizer.algorithm.abort()
        if optimizer.algorithm.models_differ and (validation or epoch == task.epochs - 1):
            hvd.consensus(model)
        if validation:
            model.eval()
            with torch.no_grad():
                measured = [{"loss": loss.item(), **metrics}
                            for loss, metrics in map(measure, task.validation_batches(validation))]
            entry["validation"] = averages(measured)
        if optimizer.algorithm.asynchronous and epoch < task.epochs - 1:
            optimizer.algorithm.resume()
        history.append(entry)
        for callback in task.callbacks:
            callback(entry)
        if task.verbose and hvd.rank() == 0:
            print(entry, flush=True)
    content = io.BytesIO()
    if hvd.rank() == 0:
        torch.save({name: value.cpu() for name, value in model.state_dict().items()}, content)
    hvd.shutdown()
    return {"history": history, "content": content.getvalue()}


@with_params(_PARAMS)
class TorchEstimator(OfTorch):
    """Parameters as keywords; see bagua_hvd.spark.common.params and this module's for their meanings.

    The model is called with the feature columns as tensors, in order; doubles become float32. If the algorithm leaves
    the models of the ranks different, the result is their mean.
    """

    required = ("optimizer", "loss")
    _trains = staticmethod(_train)
