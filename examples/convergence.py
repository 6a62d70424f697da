"""Trains with every algorithm on real data, and makes the table and the picture of docs/algorithms.md.

    baguarun -np 4 python examples/convergence.py --output docs/results/convergence

Two tasks: a CNN on scikit-learn's handwritten digits, and a small transformer on the next character of Python's help
texts. Every algorithm makes the same number of steps on the same data as gradient_allreduce with the same optimizer,
whose learning rate is the best for it. What it needs to be told otherwise is its recipe, below and in the table. Models
that differ are averaged for the evaluation. With --algorithms only these are trained, and the other rows of the output
stay what they were. "bytegrad block8" is bytegrad with this codec.
"""
import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch_char_lm import Transformer, characters
from torch_digits import Net, accuracy, digits

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms, codecs

REFERENCE = "gradient_allreduce"
# Which optimizer, for characters: SGD where what is left out of a gradient comes later or is drawn at random, which
# Adam's variance takes for noise; Adam for the others. For digits SGD, but where the algorithm is made for Adam.
NEEDS_ADAM = {"qadam", "onebit_adam", "onebit_adam_published", "zero_one_adam", "diloco"}
NEEDS_SGD = {"doublesqueeze", "ef_signsgd", "topk", "powersgd", "terngrad", "choco",
             "streaming_diloco"}
# A fraction is of all steps. Adam's normalized steps are smaller where a rank sees only the noise of its own batch, so
# ranks step by themselves in the second part of the training only (post-local SGD).
LOCAL = {"warmup_steps": 0.5}
ASYNC = {"sync_interval_ms": 0, "warmup_steps": 0.6, "max_staleness": 4}
# name -> arguments.
RECIPES = {
    "doublesqueeze": {"momentum": 0.9, "warmup_steps": 0.5},
    "ef_signsgd": {"momentum": 0.9, "warmup_steps": 0.2},
    "qadam": {"warmup_steps": 0.3},
    "onebit_adam": {"warmup_steps": 0.3},
    "onebit_adam_published": {"warmup_steps": 0.5},
    "zero_one_adam": {"variance_steps": 200, "local_scaler": 100, "max_interval": 4},
    "powersgd": {"rank": 8, "warmup_steps": 0.2},
    "topk": {"ratio": 0.1, "momentum": 0.9, "warmup_steps": 0.2},
    "local_sgd": {"communication_interval": 4, **LOCAL},
    "diloco": {"communication_interval": 5, "outer_lr": 0.7, "outer_momentum": 0.5, **LOCAL},
    "streaming_diloco": {"communication_interval": 8, "fragments": 4, "overlap_steps": 1, "mixing": 0.5,
                         "outer_lr": 0.7, "outer_momentum": 0.8},
    "decentralized": {"hierarchical": False, **LOCAL},
    "low_precision_decentralized": {"hierarchical": False, "warmup_steps": 0.6},
    "async": ASYNC,
    "async_low_precision": ASYNC,
    "async_decentralized": ASYNC,
    "async_low_precision_decentralized": ASYNC,
}
# In place of the algorithm's own, by what follows its name.
CODECS = {
    "block8": codecs.block(8), "block8/512": codecs.block(8, 512), "block8/64": codecs.block(8, 64),
    "block8/random": codecs.block(8, stochastic=True), "block8_minmax": codecs.block(8, scale="minmax"),
    "float8_e4m3": codecs.float8("e4m3"), "block4": codecs.block(4), "block4/64": codecs.block(4, 64),
    "block4/random": codecs.block(4, stochastic=True), "block4/64/random": codecs.block(4, 64, stochastic=True),
}


def make(name, arguments):
    """The algorithm of a row."""
    name, _, codec = name.partition(" ")
    return algorithms.get(name, **arguments, **({"codec": CODECS[codec]} if codec else {}))


class Digits:
    """Accuracy in percent; higher is better."""

    name, unit, sign = "digits", "test accuracy, %", 1
    rates = {"sgd": 0.015, "adam": 0.002}

    def __init__(self, args):
        self.train_set, self.test_set = digits()
        self.batch, self.epochs = 32, args.epochs

    def model(self):
        return Net()

    def batches(self, seed):
        images, labels = self.train_set.tensors
        share = len(labels) // hvd.size()
        for epoch in range(self.epochs):
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1000 * seed + epoch))
            mine = order[hvd.rank() * share:(hvd.rank() + 1) * share]
            for begin in range(0, share - self.batch + 1, self.batch):
                chosen = mine[begin:begin + self.batch]
                yield images[chosen], labels[chosen]

    def steps(self):
        return self.epochs * ((len(self.train_set) // hvd.size()) // self.batch)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model):
        return 100 * accuracy(model, self.test_set)


class Characters:
    """Bits per character on the held-out tenth; lower is better."""

    name, unit, sign = "characters", "held-out loss, bits per character", -1
    rates = {"sgd": 0.1, "adam": 0.012}
    context, batch = 48, 16

    def __init__(self, args):
        self.train_data, self.held_out, self.vocabulary = characters()
        self.count = args.steps

    def model(self):
        return Transformer(self.vocabulary, self.context, width=64, layers=2)

    def batches(self, seed):
        choice = torch.Generator().manual_seed(1000 * seed + hvd.rank())
        window = torch.arange(self.context + 1)
        for _ in range(self.count):
            starts = torch.randint(len(self.train_data) - self.context, (self.batch, 1), generator=choice)
            yield self.train_data[starts + window]

    def steps(self):
        return self.count

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def evaluate(self, model):
        starts = torch.arange(0, len(self.held_out) - self.context - 1, 4 * self.context)[hvd.rank()::hvd.size()]
        windows = self.held_out[starts[:, None] + torch.arange(self.context + 1)]
        mean = torch.stack([self.loss(model, part) for part in windows.split(64)]).mean()
        return hvd.allreduce(mean, name="loss").item() / math.log(2)


def make_optimizer(kind, parameters, rate, momentum):
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=rate)
    return torch.optim.SGD(parameters, lr=rate, momentum=momentum)


def train(task, name, kind, seed):
    """One training; returns the result, the losses on this rank's batches, and what it cost."""
    arguments = dict(RECIPES.get(name, {}))
    if isinstance(arguments.get("warmup_steps"), float):
        arguments["warmup_steps"] = max(1, int(arguments["warmup_steps"] * task.steps()))
    torch.manual_seed(seed)
    model = task.model()
    rate = task.rates[kind] * (hvd.size() if kind == "sgd" else math.sqrt(hvd.size()))
    # Momentum is the algorithm's or the optimizer's, not both.
    optimizer = make_optimizer(kind, model.parameters(), rate, 0.0 if "momentum" in arguments else 0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), algorithm=make(name, arguments))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(
        (step + 1) / (0.05 * task.steps()), 0.505 + 0.495 * math.cos(math.pi * step / task.steps())))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.statistics()            # what follows is counted from here
    losses, started = [], time.perf_counter()
    for batch in task.batches(seed):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - started
    if optimizer.algorithm.asynchronous:
        optimizer.algorithm.abort()
    sent = hvd.statistics().recent.bytes_sent / len(losses)
    if optimizer.algorithm.models_differ:
        hvd.consensus(model)
    mean_losses = hvd.allreduce(torch.tensor(losses), name="losses").tolist()
    return {"result": task.evaluate(model), "losses": mean_losses, "bytes": sent, "seconds": seconds}


def result(row):
    """With the standard deviation over the seeds, if there were several."""
    return f"{row['result']:.3f}" + (f" +- {row['spread']:.3f}" if row["spread"] is not None else "")


def run(task, names, args):
    """Rows of the table, one after the other: a dict for each algorithm and optimizer."""
    seeds = args.seeds if task.name == "digits" else args.seeds_of_characters
    for kind in ("sgd", "adam"):
        others = NEEDS_ADAM if task.name == "digits" else set(algorithms.names()) - NEEDS_SGD
        for name in names:
            if name != REFERENCE and (kind == "adam") != (name.partition(" ")[0] in others):
                continue
            trained = [train(task, name, kind, seed) for seed in range(seeds)]
            row = {
                "task": task.name, "optimizer": kind, "algorithm": name, "recipe": RECIPES.get(name, {}),
                "result": statistics.mean(one["result"] for one in trained),
                "spread": statistics.stdev(one["result"] for one in trained) if seeds > 1 else None,
                "bytes_per_step": statistics.mean(one["bytes"] for one in trained),
                "seconds": statistics.mean(one["seconds"] for one in trained),
                "losses": [round(loss, 4) for loss in trained[0]["losses"]],
            }
            if hvd.rank() == 0:
                print(f"{task.name:10} {kind:4} {name:34} {result(row):>18}   "
                      f"{row['bytes_per_step'] / 1024:8.1f} KiB/step  {row['seconds']:6.1f} s", flush=True)
            yield row


def place(row):
    """Its place in the table: task, optimizer, the reference before the others."""
    return row["task"] != "digits", row["optimizer"] != "sgd", row["algorithm"] != REFERENCE, row["algorithm"]


def replaced(rows, row):
    """The rows with a new one, in place of what there was of the same algorithm."""
    def same(other):
        return all(row[what] == other[what] for what in ("task", "algorithm")) and \
            (row["algorithm"] != REFERENCE or row["optimizer"] == other["optimizer"])

    return sorted([other for other in rows if not same(other)] + [row], key=place)


def table(rows):
    """Markdown."""
    lines = []
    for task in (Digits, Characters):
        mine = [row for row in rows if row["task"] == task.name]
        if not mine:
            continue
        lines += [f"### {task.name}: {task.unit}", "",
                  "| algorithm | optimizer | recipe | result | against gradient_allreduce | KiB per step and rank |",
                  "|---|---|---|---|---|---|"]
        for row in mine:
            reference = next(other for other in mine if other["algorithm"] == REFERENCE
                             and other["optimizer"] == row["optimizer"])
            difference = row["result"] - reference["result"]
            against = f"{difference:+.2f}" if task.sign > 0 else f"{100 * difference / reference['result']:+.2f} %"
            recipe = ", ".join(f"{key}={value}" for key, value in row["recipe"].items())
            lines.append(f"| {row['algorithm']} | {row['optimizer']} | {recipe} | {result(row)} | {against} | "
                         f"{row['bytes_per_step'] / 1024:.0f} |")
        lines.append("")
    return "\n".join(lines)


def picture(rows, path):
    """Training losses, one panel for each task and optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = list(dict.fromkeys((row["task"], row["optimizer"]) for row in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(6.5 * len(panels), 5.5), squeeze=False)
    for axis, (task, kind) in zip(axes[0], panels, strict=True):
        for number, row in enumerate(row for row in rows if (row["task"], row["optimizer"]) == (task, kind)):
            width = max(1, len(row["losses"]) // 30)
            smooth = [statistics.mean(row["losses"][max(0, i - width):i + 1]) for i in range(len(row["losses"]))]
            axis.plot(smooth, label=row["algorithm"], color=plt.get_cmap("tab20")(number % 20),
                      linestyle="-" if number < 10 else "--", linewidth=2.5 if number == 0 else 1.2)
        axis.set(title=f"{task}, {kind}", xlabel="step", ylabel="training loss (moving mean)", yscale="log")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=("digits", "characters"), default=["digits", "characters"])
    parser.add_argument("--algorithms", nargs="+", help="default: all; and the reference where the output has none")
    parser.add_argument("--seeds", type=int, default=3, help="of digits")
    parser.add_argument("--seeds-of-characters", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=30, help="of digits")
    parser.add_argument("--steps", type=int, default=400, help="of characters")
    parser.add_argument("--output", type=Path, help="folder for convergence.md, .json and .png")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    kept = args.output / "convergence.json" if args.output else None
    rows = json.loads(kept.read_text()) if hvd.rank() == 0 and kept and kept.exists() else []
    rows = hvd.broadcast_object(rows, 0, name="rows")
    chosen = args.algorithms or algorithms.names()
    for task in args.tasks:
        reference = [] if any(row["task"] == task and row["algorithm"] == REFERENCE for row in rows) else [REFERENCE]
        names = reference + [name for name in chosen if name != REFERENCE or not reference]
        for row in run({"digits": Digits, "characters": Characters}[task](args), names, args):
            rows = replaced(rows, row)
            if hvd.rank() == 0 and kept:
                args.output.mkdir(parents=True, exist_ok=True)
                kept.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
                (args.output / "convergence.md").write_text(table(rows))
    if hvd.rank() == 0 and kept:
        picture(rows, args.output / "convergence.png")
    hvd.shutdown()


if __name__ == "__main__":
    main()
