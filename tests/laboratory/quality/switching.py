"""The effect of switches of `auto` on a running training: its test loss relative to exact averages, seed by seed.

    python -m tests.laboratory.quality.switching

The algorithm is Auto, up to E1, with a fixed schedule: exact averages, after a third of the steps blocks of 8 bits in
buckets of another size, after two thirds float16. Tasks, rates, margin and test are those of the quality page. Appends
records "switching".
"""
import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bagua_hvd.algorithms import Auto
from bagua_hvd.bench import report
from bagua_hvd.core.variables import MIB
from bagua_hvd.training.model import Model
from tests.laboratory import records
from tests.laboratory.quality import grid
from tests.laboratory.quality.equivalence import judge
from tests.laboratory.quality.tasks import TASKS, Task

EXPERIMENT = "switching"
JOBS = (("tabular", "sgd"), ("images", "adam"), ("tokens", "adam"), ("characters", "adam"))
RANKS = 4
USED = ("gradient_allreduce", None), ("block(8)", 2 * MIB), ("float16", None)       # each for a third of the steps


class Told(Auto):
    """An Auto with a fixed schedule, one plan for each third of the steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(up_to="E1")
        self._steps = steps

    def after_step(self, model: Model) -> None:
        wanted = USED[min(len(USED) - 1, (model.step + 1) * len(USED) // self._steps)]
        tuner = self._tuner(model)
        tuner.plan = next(plan for plan in self._plans(model) if (plan.name, plan.bucket_bytes) == wanted)


def _train(folder: str, command: str, seeds: int) -> None:
    """Runs the trainings on each rank."""
    import torch

    import bagua_hvd.torch as hvd
    from tests.laboratory.quality.training import train

    hvd.init()
    torch.set_num_threads(1)
    found = grid.recorded()
    for kind, optimizer in JOBS:
        task: Task = TASKS[kind]()
        rate = grid.best_rate(kind, optimizer, found)
        assert rate is not None
        for seed in range(seeds):
            results: dict[str, dict[str, Any]] = {
                "exact": train(task, optimizer, rate, grid.REFERENCE, {}, seed, False),
                "switching": train(task, optimizer, rate, Told(task.steps), {}, seed, False)}
            if hvd.rank() == 0:
                losses = {way: ("nats", [got["test_loss"]]) for way, got in results.items()}
                sent = {f"bytes of {way}": ("bytes", [got["bytes_per_step"]]) for way, got in results.items()}
                setting = {"task": kind, "optimizer": optimizer, "rate": rate, "seed": seed, "ranks": hvd.size(),
                           "steps": task.steps}
                records.append(EXPERIMENT, setting, losses | sent, folder=folder, command=command)
                print(setting, {way: values for way, (_, values) in losses.items()}, flush=True)
    hvd.shutdown()


def table() -> str:
    """By task: the increase of the test loss over that of exact averages in percent, and the verdict."""
    lines = []
    for kind, optimizer in JOBS:
        found = {record.setting["seed"]: record for record in records.read(EXPERIMENT, task=kind, optimizer=optimizer)}
        if not found:
            continue
        ratios = [record.samples["switching"].values[0] / record.samples["exact"].values[0]
                  for record in found.values()]
        sent = [record.samples["bytes of switching"].values[0] / record.samples["bytes of exact"].values[0]
                for record in found.values()]
        verdict = judge(ratios, grid.MARGIN, grid.LEVEL)
        lines.append((f"{kind}, {optimizer}", str(verdict.seeds), f"{100 * verdict.change:+.2f}",
                      f"{100 * verdict.spread:.2f}", verdict.word, f"{statistics.median(sent):.2f}"))
    if not lines:
        return "Nothing measured yet."
    return report.table(("task", "seeds", "loss, %", "spread", f"margin of {100 * grid.MARGIN:g} %", "bytes"), lines,
                        left=1)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.laboratory.quality.switching", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=len(grid.SEEDS), help=f"default {len(grid.SEEDS)}")
    parser.add_argument("--folder", default=str(records.FOLDER), help="of the records")
    parser.add_argument("--rank", help=argparse.SUPPRESS)       # set if this process is a rank of such a command
    options = parser.parse_args(arguments)
    if options.rank:
        _train(options.folder, options.rank, options.seeds)
        return 0
    run = [sys.executable, "-m", "bagua_hvd.runner.launch", "-np", str(RANKS), sys.executable, "-m",
           "tests.laboratory.quality.switching", "--rank", f"python -m tests.laboratory.quality.switching "
           f"--seeds {options.seeds}", "--folder", str(Path(options.folder).resolve()), "--seeds", str(options.seeds)]
    return subprocess.run(run, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
