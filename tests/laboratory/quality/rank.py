"""A rank of a job that runs trainings one after the other, and writes a record after each."""
import json
import os
import time
from pathlib import Path

import torch

import bagua_hvd.torch as hvd
from tests.laboratory import records
from tests.laboratory.quality.grid import EXPERIMENT, FULL_STEP_BITS, Cell, with_codec
from tests.laboratory.quality.tasks import TASKS, Task
from tests.laboratory.quality.training import UNITS, train


def run(cells_file: str, folder: str, command: str, until: float) -> None:
    """Runs the trainings of a file, a list of Cells; none starts after the time `until`, as of time.time()."""
    os.environ.pop("BAGUA_FULL_STEPS", None)       # the defaults are tested
    os.environ["BAGUA_FULL_STEP_BITS"] = str(FULL_STEP_BITS)
    os.environ["BAGUA_HIERARCHY"] = "0"            # each rank acts as a host
    hvd.init()
    torch.set_num_threads(1)
    tasks: dict[str, Task] = {}
    cells = [Cell(*fields) for fields in json.loads(Path(cells_file).read_text())]
    for number, cell in enumerate(cells, 1):
        if hvd.broadcast_object(time.time() > until, 0, name="late"):
            break
        task = tasks.setdefault(cell.task, TASKS[cell.task]())
        got = train(task, cell.optimizer, cell.rate, cell.algorithm, with_codec(cell.arguments), cell.seed,
                    cell.split == "skewed")
        if hvd.rank() == 0:
            samples = {name: (unit, got[name] if isinstance(got[name], list) else [got[name]])
                       for name, unit in UNITS.items()}
            records.append(EXPERIMENT, cell.setting(), samples, folder=folder, command=command)
            print(f"{number}/{len(cells)} {cell.task} {cell.optimizer} {cell.rate:g} {cell.algorithm} n={cell.ranks} "
                  f"{cell.split} seed {cell.seed}: test loss {got['test_loss']:.4f}, accuracy "
                  f"{got['test_accuracy']:.3f}, {got['bytes_per_step'] / 1024:.0f} KiB a step, "
                  f"{got['processor_seconds']:.1f} s of processors", flush=True)
    hvd.shutdown()
