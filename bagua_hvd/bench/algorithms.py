"""Steps per second of one training with each algorithm: `python -m bagua_hvd.bench.algorithms --hosts 2 --rate 1gbit`.

Every algorithm trains the same multilayer perceptron in the same job, in turn, in several rounds; "none" is training
without communication, "tcp" the same beside another process that only moves what a round of async does, as often,
between two ranks: what such rounds cost at least on cores that do the network's work too. Seconds are the slowest
rank's, medians over the rounds. --hosts puts the ranks on hosts with links of the given rate (bench/hosts.py); without
it they share this one.

The batch is one example by default: what communication costs shows where a step computes quickly for its number of
parameters, as it does on a GPU. A CPU's step is never free, though: forward, backward and the optimizer read and write
the parameters five times, which "none" shows, and no algorithm can be faster. The ranks keep the memory that they free:
else glibc gives each step's gradients back to the kernel or does not, depending on what trained before, and that makes
a step 1.8 times as long.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from bagua_hvd.bench.hosts import Hosts, why_impossible
from bagua_hvd.bench.traffic import Traffic

DEFAULT = ("none", "gradient_allreduce", "bytegrad", "qsgd", "doublesqueeze", "topk", "powersgd", "decentralized",
           "low_precision_decentralized", "choco", "local_sgd", "async", "async_low_precision")
WITHOUT = ("none", "tcp")        # of our communication
WIDTH = 1024
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def _model(parameters):
    from torch import nn

    depth = max(1, round(parameters / WIDTH**2))
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def _train(name, options):
    """(seconds, bytes sent) of a step on this rank."""
    import torch

    import bagua_hvd.torch as hvd
    from bagua_hvd import algorithms
    from bagua_hvd.job import basics

    in_rounds = name.startswith("async")
    torch.manual_seed(0)
    model = _model(options.parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if name not in WITHOUT:
        arguments = {"sync_interval_ms": options.sync_interval_ms} if in_rounds else {}
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), algorithm=algorithms.get(name, **arguments)
        )
    batch = torch.randn(options.batch, WIDTH)

    def step():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def timed(steps, seconds):
        made, started = 0, time.perf_counter()
        while made < steps or time.perf_counter() - started < seconds:
            step()
            made += 1
        return made, time.perf_counter() - started

    with (Traffic(hvd.rank(), options.first_host, 4 * options.parameters, options.sync_interval_ms / 1e3)
          if name == "tcp" else nullcontext()):
        timed(2, 2e-3 * options.sync_interval_ms if in_rounds or name == "tcp" else 0)      # the first round may set up
        hvd.barrier()                                                                       # others
        sent = basics.context().counters().payload_bytes_sent
        steps, seconds = timed(options.steps, options.seconds if in_rounds or name in WITHOUT else 0)
        sent = basics.context().counters().payload_bytes_sent - sent
    if name not in WITHOUT and optimizer.algorithm.asynchronous:
        optimizer.algorithm.abort()
    return seconds / steps, sent / steps


def _rank(options):
    import torch

    import bagua_hvd.torch as hvd

    os.environ["BAGUA_EXACT_STEPS"] = "0"       # what is timed are relaxed steps
    hvd.init()
    torch.set_num_threads(1)
    rows: dict[str, list] = {name: [] for name in options.algorithms}
    for _ in range(options.rounds):
        for name in options.algorithms:
            seconds, sent = hvd.allreduce(torch.tensor(_train(name, options)), op=hvd.Max, name="row").tolist()
            rows[name].append((seconds, sent))
    if hvd.rank() == 0:
        Path(options.rows).write_text(json.dumps(rows))
    hvd.shutdown()


def _report(rows):
    reference = statistics.median(seconds for seconds, _ in rows[next(iter(rows))])
    base = statistics.median(seconds for seconds, _ in rows.get("gradient_allreduce", [(reference, 0)]))
    print(f"{'algorithm':36}{'steps/s':>9}{'ms/step':>9}{'of ' + next(iter(rows)):>10}{'to allreduce':>14}"
          f"{'KiB sent':>11}")
    for name, measured in rows.items():
        seconds = statistics.median(seconds for seconds, _ in measured)
        sent = statistics.median(sent for _, sent in measured)
        print(f"{name:36}{1 / seconds:9.2f}{1e3 * seconds:9.1f}{reference / seconds:10.0%}{base / seconds:13.2f}x"
              f"{sent / 1024:11.0f}")


def main():
    parser = argparse.ArgumentParser(prog="python -m bagua_hvd.bench.algorithms", description=__doc__)
    parser.add_argument("-np", type=int, default=2, help="ranks; default 2")
    parser.add_argument("--hosts", type=int, default=0, help="spread the ranks over so many network namespaces")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it; default 1gbit")
    parser.add_argument("--parameters", type=int, default=10_000_000, help="of the model, about; default 10,000,000")
    parser.add_argument("--batch", type=int, default=1, help="per rank; default 1")
    parser.add_argument("--steps", type=int, default=10, help="timed, per round; default 10")
    parser.add_argument("--seconds", type=float, default=4.0,
                        help="at least, for none and asynchronous algorithms; default 4")
    parser.add_argument("--sync-interval-ms", type=float, default=500, help="of asynchronous algorithms; default 500")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--algorithms", nargs="+", default=list(DEFAULT), help="default: " + " ".join(DEFAULT))
    parser.add_argument("--rows", help=argparse.SUPPRESS)       # this process is a rank
    parser.add_argument("--first-host", default="127.0.0.1", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows:
        _rank(options)
        return
    problem = why_impossible() if options.hosts else None
    if "tcp" in options.algorithms and options.np != 2:
        problem = f"tcp is traffic between two ranks, not {options.np}"
    if problem:
        parser.error(problem)
    place = Hosts(options.hosts, options.rate) if options.hosts else nullcontext()
    with tempfile.TemporaryDirectory() as folder, place as hosts:
        rows = Path(folder, "rows.json")
        rank = [sys.executable, "-m", "bagua_hvd.bench.algorithms", *sys.argv[1:], "--rows", str(rows)]
        if hosts:
            rank += ["--first-host", hosts.address_of(0)]
            rank = [sys.executable, "-m", "bagua_hvd.bench.hosts", *rank]
        with hosts.job(options.np) if hosts else nullcontext({}) as variables:
            subprocess.run(
                [sys.executable, "-m", "bagua_hvd.runner.launch", "-np", str(options.np), *rank],
                env={**os.environ, "OMP_NUM_THREADS": "1", **KEEP_MEMORY, **variables}, check=True,
            )
        _report(json.loads(rows.read_text()))


if __name__ == "__main__":
    main()
