"""Measures how long the ranks of an elastic job pause when another one joins: a table for docs/decisions/failure.md.

    python tests/elastic/joining.py [--mb 100] [--rate 1gbit] [--repetitions 3] [--only sgd]

Three ranks train a model of --mb MB with every_step=True, then a fourth one joins. Each runs on a host of its own, a
network namespace with a link of --rate (needs root, ip, tc, sshd). A step of 100 MB at 1 Gbit/s takes as long as one of
25 MB at 250 Mbit/s, which needs less of this machine. The pause is the longest gap between two steps of the three ranks
minus the duration of a step of four.
"""
import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT)]

import torch  # noqa: E402

from elastic_job import ElasticJob  # noqa: E402
from launcher import Launcher, wait_until  # noqa: E402
from ssh_hosts import Namespaces  # noqa: E402

LAYERS, STEPS = 6, 8
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-3),
}


def work(megabytes, name):
    import bagua_hvd.torch as hvd

    torch.set_num_threads(1)
    width = round((float(megabytes) * 1e6 / 4 / LAYERS) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    optimizer = OPTIMIZERS[name](model.parameters())
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, every_step=True)
    file = open(Path(os.environ["TEST_LOG"]) / f"{os.getpid()}.log", "a", buffering=1)

    @hvd.elastic.run
    def train(state):
        while not hvd.broadcast_object(os.path.exists(os.environ["TEST_STOP"]), name="stop"):
            optimizer.zero_grad()
            model(torch.randn(1, width)).square().mean().backward()
            optimizer.step()
            file.write(json.dumps([time.time(), hvd.size()]) + "\n")

    train(state)


def ends_of_steps(folder):
    """For each process: the end times of its steps with three ranks, and with four."""
    logs = [[json.loads(line) for line in file.read_text().split("\n")[:-1]] for file in folder.glob("*.log")]
    return [[[at for at, size in log if size == wanted] for wanted in (3, 4)] for log in logs]


def durations(ends):
    """Durations of all steps but the first, which follows a change."""
    return [later - earlier for earlier, later in zip(ends, ends[1:], strict=False)]


def measure(options, optimizer):
    """Seconds: (a step of three ranks, a step of four, the longest gap between steps of the first three)."""
    with tempfile.TemporaryDirectory(prefix="joining.") as name:
        folder = Path(name)
        logs = folder / "logs"
        logs.mkdir()
        namespaces, launcher = Namespaces(folder, 4), Launcher(folder)
        try:
            namespaces.limit(options.rate)
            hosts = {"h0": 1, "h1": 1, "h2": 1}
            job = ElasticJob(launcher, hosts)
            job.start("--min-np", 1, "--max-np", 4, command=[__file__, "work", options.mb, optimizer],
                      env={"TEST_LOG": str(logs), "OMP_NUM_THREADS": "1", **namespaces.environment},
                      prefix=namespaces.enter(0))
            wait_until(lambda: any(len(three) > STEPS for three, _ in ends_of_steps(logs)), 300)
            job.set_hosts({**hosts, "h3": 1})
            wait_until(lambda: any(len(four) > STEPS for _, four in ends_of_steps(logs)), 300)
            if job.finish(100) != 0:
                raise RuntimeError(job.text)
            old = [ends for ends in ends_of_steps(logs) if ends[0]]
            three, four = (statistics.median(step for ends in old for step in durations(ends[place]))
                           for place in (0, 1))
            return three, four, max(ends[1][0] - ends[0][-1] for ends in old)
        finally:
            launcher.close()
            namespaces.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=100)
    parser.add_argument("--rate", default="1gbit", help="as tc takes it")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", default="", help="optimizers whose names contain this")
    options = parser.parse_args()
    print("| optimizer | step of 3: s | step of 4: s | longest gap: median s | max s | pause in steps: median | max |\n"
          "|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for optimizer in OPTIMIZERS:
        if options.only not in optimizer:
            continue
        found = [measure(options, optimizer) for _ in range(options.repetitions)]
        three, four, gaps = zip(*found, strict=True)
        pauses = [gap / step - 1 for _, step, gap in found]
        figures = (statistics.median(three), statistics.median(four), statistics.median(gaps), max(gaps),
                   statistics.median(pauses), max(pauses))
        print(f"| {optimizer} | {' | '.join(f'{figure:.2f}' for figure in figures)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(*sys.argv[2:])
    else:
        main()
