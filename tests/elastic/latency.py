"""Measures how the latency between hosts affects the start and the recovery of an elastic job: a table.

    python tests/elastic/latency.py [--ranks 3 4] [--delay 0 5 10] [--rate none] [--mb 0.01] [--repetitions 3]

Each rank runs on a host of its own, a network namespace with a link of --rate and a one-way delay of --delay ms to
every other host (needs root, ip, nsenter, sshd). The ranks train a model of --mb MB with every_step=True, until one
gets SIGKILL. Medians in seconds:

    init         from the last rank's call of hvd.init() to its return on all ranks
    connected    from the signal until all survivors have left the job and joined it again
    ready        until they have agreed on the state
    step         until they have completed a step
"""
import argparse
import json
import os
import random
import signal
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

PHASES = "connected", "ready", "step"


def work(megabytes):
    import bagua_hvd.torch as hvd

    torch.set_num_threads(1)
    width = round((float(megabytes) * 1e6 / 4) ** 0.5)
    model = torch.nn.Linear(width, width)
    file = open(Path(os.environ["TEST_LOG"]) / f"{os.getpid()}.log", "a", buffering=1)

    def log(event):
        file.write(json.dumps([event, time.time(), hvd.size() if hvd.is_initialized() else 0,
                               hvd.rank() if hvd.is_initialized() else 0]) + "\n")

    log("begin")
    hvd.init()
    log("init")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, every_step=True)
    state.register_reset_callbacks([lambda: log("connected")])

    @hvd.elastic.run
    def train(state):
        log("ready")
        while not hvd.broadcast_object(os.path.exists(os.environ["TEST_STOP"]), name="stop"):
            optimizer.zero_grad()
            model(torch.randn(1, width)).square().mean().backward()
            optimizer.step()
            log("step")
            time.sleep(0.02)

    train(state)


def times(folder, event, size):
    """{pid: (time, rank)} of each process's first such event in a job of this size."""
    found = {}
    for file in folder.glob("*.log"):
        for name, at, of, rank in map(json.loads, file.read_text().split("\n")[:-1]):
            if (name, of) == (event, size):
                found.setdefault(int(file.stem), (at, rank))
    return found


def last(found):
    return max(at for at, _ in found.values())


def measure(ranks, delay, options):
    """Seconds: (init, *PHASES)."""
    with tempfile.TemporaryDirectory(prefix="latency.") as name:
        folder = Path(name)
        logs = folder / "logs"
        logs.mkdir()
        namespaces, launcher = Namespaces(folder, ranks), Launcher(folder)
        try:
            namespaces.delay(delay, options.rate)
            job = ElasticJob(launcher, {f"h{i}": 1 for i in range(ranks)})
            job.start("--min-np", 1, "--max-np", ranks, command=[__file__, "work", options.mb],
                      env={"TEST_LOG": str(logs), "OMP_NUM_THREADS": "1", **namespaces.environment},
                      prefix=namespaces.enter(0))
            wait_until(lambda: len(times(logs, "step", ranks)) == ranks, 300)
            time.sleep(random.uniform(1, 2))
            init = last(times(logs, "init", ranks)) - last(times(logs, "begin", 0))
            pids = {rank: pid for pid, (_, rank) in times(logs, "init", ranks).items()}
            os.kill(pids[options.victim], signal.SIGKILL)
            killed = time.time()
            wait_until(lambda: len(times(logs, "step", ranks - 1)) == ranks - 1, 300)
            if job.finish(100) != 0:
                raise RuntimeError(job.text)
            return init, *(last(times(logs, phase, ranks - 1)) - killed for phase in PHASES)
        finally:
            launcher.close()
            namespaces.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--delay", type=float, nargs="+", default=[0, 5, 10], metavar="MS")
    parser.add_argument("--rate", default="none", help="as tc takes it")
    parser.add_argument("--mb", type=float, default=0.01)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--victim", type=int, default=1, help="the rank that is killed")
    options = parser.parse_args()
    print(f"| ranks | one way: ms | init | {' | '.join(PHASES)} | step, max |\n|{7 * '---:|'}", flush=True)
    for ranks in options.ranks:
        for delay in options.delay:
            found = list(zip(*(measure(ranks, delay, options) for _ in range(options.repetitions)), strict=True))
            figures = *map(statistics.median, found), max(found[-1])
            print(f"| {ranks} | {delay:g} | {' | '.join(f'{figure:.2f}' for figure in figures)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(*sys.argv[2:])
    else:
        main()
