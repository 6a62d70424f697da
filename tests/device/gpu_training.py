"""Trains a small transformer with every algorithm on GPUs that the ranks may share; see gpu_check.sh.

    baguarun -np 2 python tests/device/gpu_training.py

Prints one line per algorithm: the loss of the first and of the last steps, in bits per character, and steps per second.
Exit code 1: a loss is not finite or has not fallen. With --device cpu the same training runs on the CPU.
"""
import argparse
import math
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from torch_char_lm import Transformer, characters  # noqa: E402

CONTEXT, BATCH, SHOWN = 64, 32, 10
# They need Adam, or have their own optimizer.
ADAM = {"onebit_adam", "qadam"}


def make_optimizer(name, model, algorithm):
    if isinstance(algorithm, algorithms.QAdam):
        optimizer = hvd.QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=algorithm.warmup_steps)
    elif name in ADAM:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), algorithm=algorithm)


def train(name, data, vocabulary, device, steps):
    """The loss of every step, as the mean over the ranks, and the duration of all steps in seconds."""
    torch.manual_seed(1)
    model = Transformer(vocabulary, CONTEXT, width=64).to(device)
    arguments = {"warmup_steps": steps // 3} if name in ADAM else {}
    optimizer = make_optimizer(name, model, algorithms.get(name, **arguments))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    choice, window = torch.Generator().manual_seed(hvd.rank()), torch.arange(CONTEXT + 1)
    losses, started = [], time.perf_counter()
    for _ in range(steps):
        windows = data[torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=choice) + window].to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses).cpu()
    seconds = time.perf_counter() - started
    if optimizer.algorithm.asynchronous:
        optimizer.algorithm.abort()
    return hvd.allreduce(losses, name=f"{name}.losses") / math.log(2), seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--algorithms", nargs="+", default=list(algorithms.names()), help="default: all")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    hvd.init()
    device = torch.device(args.device, hvd.local_rank() % torch.cuda.device_count() if args.device == "cuda" else None)
    data, _, vocabulary = characters()
    failed = []
    for name in args.algorithms:
        losses, seconds = train(name, data, vocabulary, device, args.steps)
        first, last = losses[:SHOWN].mean().item(), losses[-SHOWN:].mean().item()
        if not (torch.isfinite(losses).all() and last < first):
            failed.append(name)
        if hvd.rank() == 0:
            print(f"{name:<36} {first:6.3f} -> {last:6.3f} bits per character, {args.steps / seconds:7.1f} steps/s",
                  flush=True)
    hvd.shutdown()
    if failed:
        sys.exit(f"not trained: {', '.join(failed)}")


if __name__ == "__main__":
    main()
