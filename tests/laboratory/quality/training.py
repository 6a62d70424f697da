"""One training on this rank, as a user would write it, with the algorithm's name; and its results."""
import copy
import math
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms
from bagua_hvd.algorithms import Algorithm
from tests.laboratory import ddp
from tests.laboratory.quality import grid
from tests.laboratory.quality.tasks import Task

UNITS = {                       # of train()'s results
    "test_loss": "nats", "test_accuracy": "1", "validation_loss": "nats", "validation_accuracy": "1",
    "train_loss": "nats", "curve_steps": "steps", "curve": "nats", "bytes_per_step": "bytes", "apart": "1",
    "parameters": "1", "processor_seconds": "s",
}
LOOKS = 12                      # evaluations on the validation data during a training


class Muon(torch.optim.Adam):
    """Matrices step along the orthonormal matrix nearest to their momentum; other weights use Adam.

    A weight counts as a matrix if a factorization of a quarter of its rank would have fewer elements.
    """

    rank_fraction, momentum, scale = 0.25, 0.95, 0.2

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        matrices = {}
        for x in self.param_groups[0]["params"]:
            rows, columns = (x.shape[0], x.numel() // x.shape[0]) if x.dim() > 1 else (1, 1)
            rank = math.ceil(self.rank_fraction * min(rows, columns))
            if rows * columns > rank * (rows + columns):
                matrices[x], x.grad = x.grad.view(rows, columns), None
        super().step(closure)
        for x, g in matrices.items():
            momentum = self.state.setdefault(x, {"momentum": torch.zeros_like(g)})["momentum"]
            momentum.mul_(self.momentum).add_(g)
            u, _, v = torch.linalg.svd(momentum, full_matrices=False)
            x.sub_(self.param_groups[0]["lr"] * self.scale * math.sqrt(max(g.shape)) * (u @ v).view(x.shape))
            x.grad = g.view(x.shape)


OPTIMIZERS = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01),
    "muon": lambda parameters, rate: Muon(parameters, lr=rate),
}


def _mean_of(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model with the mean of the ranks' weights."""
    mean = copy.deepcopy(model)
    flat = torch.nn.utils.parameters_to_vector(mean.parameters()).detach()
    torch.nn.utils.vector_to_parameters(hvd.allreduce(flat, name="mean model"), mean.parameters())
    return mean


def _evaluate(task: Task, model: torch.nn.Module, part: str, limit: int | None = None) -> tuple[float, float]:
    """(loss, share of correct answers) of the ranks' mean model; each rank evaluates its share of the rows."""
    rows = torch.arange(len(task.parts[part][0]))[:limit][hvd.rank()::hvd.size()]
    sums = hvd.allreduce(task.sums(_mean_of(model), part, rows), op=hvd.Sum, name="evaluation")
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def apart(model: torch.nn.Module) -> float:
    """Root mean square of the ranks' distances from their mean, relative to the mean's norm."""
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    mean = hvd.allreduce(flat, name="mean")
    squares = hvd.allreduce(torch.stack([(flat - mean).square().sum(), mean.square().sum()]), name="squares")
    return math.sqrt((squares[0] / squares[1]).item())


def _hooked(model: torch.nn.Module, way: str) -> torch.nn.Module:
    """The model in DistributedDataParallel, over gloo."""
    if not dist.is_initialized():
        file = hvd.broadcast_object(tempfile.mktemp(), 0, name="file of gloo")
        dist.init_process_group("gloo", f"file://{file}", rank=hvd.rank(), world_size=hvd.size())
    wrapped: torch.nn.Module = ddp.hooked(model, way)
    return wrapped


def _fine_tuned(task: Task, model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy of the ranks' mean model, trained for the task with full gradients."""
    model, ((name, (rate,)),) = _mean_of(model), task.optimizers.items()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](model.parameters(), rate), model.named_parameters())
    for x, y in task.batches(hvd.rank(), hvd.size(), seed, skewed=False):
        optimizer.zero_grad()
        task.loss(model, x, y).backward()
        optimizer.step()
    return model


def train(task: Task, optimizer_name: str, rate: float, algorithm: str | Algorithm, arguments: dict[str, Any],
          seed: int, skewed: bool) -> dict[str, Any]:
    """The same results on all ranks, with UNITS; losses are NaN or infinite if it diverged.

    apart: the final distance between ranks. curve: validation losses of the ranks' mean model, at curve_steps.
    """
    torch.manual_seed(seed)
    model = task.make()
    # Algorithms with their own steps replace those of the user's Adam.
    optimizer: Any = OPTIMIZERS[optimizer_name](model.parameters(), rate)
    if algorithm in grid.HOOKS:
        computing, used = _hooked(model, str(algorithm)), Algorithm()
    else:
        computing, used = model, algorithms.get(algorithm, **arguments)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), algorithm=used)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(
        (step + 1) / (0.05 * task.steps), 0.525 + 0.475 * math.cos(math.pi * step / task.steps)) if task.decays else 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    looks = {task.steps * (look + 1) // LOOKS for look in range(LOOKS)}
    hvd.statistics()            # counting starts here
    sent, losses, curve, started = 0, [], [], time.process_time()
    for step, (x, y) in enumerate(task.batches(hvd.rank(), hvd.size(), seed, skewed), 1):
        optimizer.zero_grad()
        loss = task.loss(computing, x, y)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step in looks:
            sent += hvd.statistics().recent.bytes_sent
            curve.append((step, _evaluate(task, model, "validation", 1024)[0]))
            hvd.statistics()
    if used.asynchronous:
        used.abort()        # type: ignore[attr-defined]
    distance = apart(model)
    if used.models_differ:
        hvd.consensus(model)
    if task.then:
        model = _fine_tuned(task.then, model, seed)
    validation, test = (_evaluate(task.then or task, model, part) for part in ("validation", "test"))
    train_loss = hvd.allreduce(torch.tensor(losses[-len(losses) // 10:]), name="losses").mean().item()
    seconds = hvd.allreduce(torch.tensor(time.process_time() - started), op=hvd.Sum, name="seconds").item()
    everyone = hvd.allreduce(torch.tensor([float(sent)]), name="sent").item()
    return {
        "parameters": sum(each.numel() for each in model.parameters()), "train_loss": train_loss,
        "validation_loss": validation[0], "validation_accuracy": validation[1], "test_loss": test[0],
        "test_accuracy": test[1], "curve_steps": [step for step, _ in curve], "curve": [loss for _, loss in curve],
        "bytes_per_step": everyone / task.steps, "apart": distance, "processor_seconds": seconds,
    }
