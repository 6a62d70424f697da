"""What auto chooses on some network, beside every plan that it may choose: `python -m bagua_hvd.bench.auto --hosts 2`.

Each plan is pinned and timed, in the same job, and then Auto, after it has had --settle steps. Times are of a step, the
slowest rank's, medians. The model and its memory are those of bagua_hvd.bench.algorithms.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bagua_hvd.bench import records, report
from bagua_hvd.bench.algorithms import KEEP_MEMORY, WIDTH, _model
from bagua_hvd.bench.hosts import Hosts, why_impossible


def _timed(algorithm, options, settle):
    """(seconds of each step, what was used at the end) of a training on this rank."""
    import torch

    import bagua_hvd.torch as hvd

    torch.manual_seed(0)
    model = _model(options.parameters)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model.named_parameters(),
                                         algorithm=algorithm)
    batch = torch.randn(options.batch, WIDTH)
    taken = []
    for number in range(settle + options.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if number >= settle:
            taken.append(time.perf_counter() - began)
    return taken, algorithm.plan(optimizer.reducer.model)["algorithm"]


def _rank(options):
    import torch

    import bagua_hvd.torch as hvd
    from bagua_hvd.algorithms import Auto

    hvd.init()
    torch.set_num_threads(1)
    rows = []
    for plan in [*Auto(up_to=options.up_to).algorithms, None]:
        pinned = None if plan is None else {"algorithm": plan}
        taken, used = _timed(Auto(up_to=options.up_to, plan=pinned, window=options.window), options,
                             3 if pinned else options.settle)
        slowest = hvd.allreduce(torch.tensor(taken), op=hvd.Max, name="taken").tolist()
        rows.append((plan, used, slowest))
    if hvd.rank() == 0:
        Path(options.rows).write_text(json.dumps(rows))
    hvd.shutdown()


def main():
    """The program."""
    parser = argparse.ArgumentParser(prog="python -m bagua_hvd.bench.auto", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2, help="network namespaces, a rank on each; default 2")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it; default 1gbit")
    parser.add_argument("--delay", type=float, help="ms, one way; default: none, packets go through the kernel alone")
    parser.add_argument("--parameters", type=int, default=4_000_000, help="of the model, about; default 4,000,000")
    parser.add_argument("--batch", type=int, default=4, help="per rank; default 4")
    parser.add_argument("--steps", type=int, default=10, help="timed, of each; default 10")
    parser.add_argument("--settle", type=int, default=60, help="steps that Auto has before; default 60")
    parser.add_argument("--window", type=int, default=5, help="of Auto; default 5 steps")
    parser.add_argument("--up-to", default="E1", help="default E1")
    parser.add_argument("--record", action="store_true", help="append to docs/results/records/auto.jsonl")
    parser.add_argument("--rows", help=argparse.SUPPRESS)       # this process is a rank
    options = parser.parse_args()
    if options.rows:
        _rank(options)
        return
    if why_impossible():
        parser.error(why_impossible())
    with tempfile.TemporaryDirectory() as folder, Hosts(options.hosts, options.rate, options.delay) as hosts, \
            hosts.job(options.hosts) as variables:
        rows = Path(folder, "rows.json")
        subprocess.run(
            [sys.executable, "-m", "bagua_hvd.runner.launch", "-np", str(options.hosts), sys.executable, "-m",
             "bagua_hvd.bench.hosts", sys.executable, "-m", "bagua_hvd.bench.auto", *sys.argv[1:], "--rows",
             str(rows)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **KEEP_MEMORY, **variables}, check=True)
        measured = json.loads(rows.read_text())
    medians = {plan or "auto": statistics.median(taken) for plan, _, taken in measured}
    best = min((seconds, plan) for plan, seconds in medians.items() if plan != "auto")
    lines = [(plan, f"{seconds * 1e3:.1f}", f"{seconds / best[0]:.2f}") for plan, seconds in medians.items()]
    print(report.table(("plan", "ms a step", "of the best"), lines, left=1))
    print(f"auto used {measured[-1][1]}; the quickest was {best[1]}")
    if options.record:
        setting = {name: value for name, value in vars(options).items() if name not in ("rows", "record")}
        samples = {plan or "auto": ("s", taken) for plan, _, taken in measured}
        records.append("auto", {**setting, "used": measured[-1][1]}, samples, shared=True)


if __name__ == "__main__":
    main()
