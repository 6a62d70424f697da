"""Measures the time that communication adds to a training step: `python -m bagua_hvd.bench.train`.

Two models of about 10 million parameters train with SGD and momentum on data of their own on each rank: a multilayer
perceptron (batch 64) and a convolutional network (batch 32 of 3x32x32). "none" is the same without communication;
*exposed* is the part of a step that none does not need, that is, communication that the computation does not hide.
"late" is bagua with delay=1, gloo is torch's DistributedDataParallel. "barrier" is none with a barrier at the end of
each step: what it alone costs that ranks need the memory's bandwidth at the same time and wait for the slower one. A
sample is the slowest rank's time for one step.

Starts its ranks itself. Started as the ranks of a job (`baguarun -np N python -m bagua_hvd.bench.train`) it measures in
that job. With a backend's name, a folder and options as its arguments it is one rank of one round.
"""
import argparse
import functools
import json
import os
import statistics
import sys
import time
from typing import Any

from bagua_hvd import algorithms
from bagua_hvd.bench import rank, report, rounds
from bagua_hvd.bench.__main__ import job_rank, job_size, positive, run, set_ranks
from bagua_hvd.bench.rank import Others, Results

MODELS = ("mlp", "cnn")
BACKENDS = ("none", "bagua", "gloo", "late", "barrier")
OURS = ("bagua", "late")
COLUMNS = ("model", "backend", "steps/s", "median ms", "min", "max", "exposed")


def _mlp(nn):
    hidden = [layer for _ in range(2) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), *hidden, nn.Linear(2048, 10)), (64, 784)


def _cnn(nn):
    layers, channels = [], 3
    for width, stride in ((64, 2), (128, 2), (256, 2), (512, 2), (512, 1), (512, 1), (512, 1)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000), nn.ReLU(), nn.Linear(1000, 10)]
    return nn.Sequential(*layers, *head), (32, 3, 32, 32)


def _wrapped(name, model, optimizer, options):
    """(model for the forward pass, optimizer)."""
    if name in OURS:
        import bagua_hvd.torch as hvd

        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm=options.algorithm,
                                               delay=int(name == "late"))
    if name == "gloo":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model), optimizer
    return model, optimizer


def _measure(name, backend, options):
    """{model: seconds of each step} on this rank."""
    import torch

    torch.set_num_threads(1)
    return {kind: _times(name, kind, backend, options) for kind in options.models}


def _times(name, kind, backend, options):
    import torch
    from torch import nn

    torch.manual_seed(0)
    model, shape = {"mlp": _mlp, "cnn": _cnn}[kind](nn)
    compute, optimizer = _wrapped(name, model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), options)
    torch.manual_seed(1 + backend.rank)
    batch, labels = torch.randn(shape), torch.randint(0, 10, shape[:1])
    times = []
    for step in range(options.warmup_steps + options.steps):
        if step == options.warmup_steps:
            backend.barrier()
        started = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(compute(batch), labels).backward()
        optimizer.step()
        if name == "barrier":
            backend.barrier()
        times.append(time.perf_counter() - started)
    return times[options.warmup_steps:]


def _lines(results, models):
    for kind in models:
        none = None
        for name, times in results.items():
            samples = [1e3 * sample for samples in times[kind] for sample in samples]
            median = statistics.median(samples)
            none = median if name == "none" else none
            exposed = "-" if none is None or name == "none" else f"{report.exposed(none, median):.0%}"
            milliseconds = (f"{value:.1f}" for value in (median, min(samples), max(samples)))
            yield kind, name, f"{1e3 / median:.2f}", *milliseconds, exposed


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bagua_hvd.bench.train", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=positive, help="ranks; default 2, in a job its size")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="default: both")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS[:3],
                        help="default: none bagua gloo")
    parser.add_argument("--algorithm", default="gradient_allreduce", help="of bagua; default gradient_allreduce")
    parser.add_argument("--rounds", type=positive, default=3,
                        help="rounds per backend, each in new processes, backends in turn; default 3")
    parser.add_argument("--steps", type=positive, default=20, help="timed, per round; default 20")
    parser.add_argument("--warmup-steps", type=int, default=5, help="not timed; default 5")
    return parser


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses and checks the options. Wrong ones end the process with one sentence and exit code 2."""
    options = parser.parse_args()
    try:
        set_ranks(options)
        algorithms.get(options.algorithm)
    except ValueError as error:
        parser.error(str(error))
    return options


def measure_and_print(options: argparse.Namespace, where: Any = None,
                      guard: rounds.Guard | None = None) -> tuple[Results, Others]:
    """See measure_and_print() in bagua_hvd.bench.__main__."""
    os.environ["BAGUA_FULL_STEPS"] = "0"       # measure relaxed steps only
    speaks = job_rank() == 0
    if speaks:
        print(report.machine_line(report.machine()), flush=True)
    if job_size() is not None:
        results, others = rounds.in_job(options, functools.partial(_measure, options=options))
    else:
        results, others = rounds.interleaved(
            options.backends, options,
            lambda name: rounds.slowest(rounds.run_round(name, options, where, "bagua_hvd.bench.train")), guard)
    if not speaks:
        return results, others
    print("\n" + report.table(COLUMNS, list(_lines(results, options.models)), left=2))
    if busy := report.others_line(others):
        print("\n" + busy)
    return results, others


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[3].startswith("{"):
        sys.exit(rank.main(sys.argv[1], sys.argv[2], argparse.Namespace(**json.loads(sys.argv[3])), _measure))
    sys.exit(run(measure_and_print, parse_options(build_parser())))
