"""Trains with every algorithm, with default arguments, and records the results. See the package.

    python -m tests.laboratory.quality --tune                        chooses the learning rates, on 4 ranks
    python -m tests.laboratory.quality --ranks 4                     all tasks, algorithms, splits and seeds
    python -m tests.laboratory.records                               regenerates docs/results/quality.md

Trainings with a record are skipped, so the same command continues after an interruption (--minutes, Ctrl-C).
"""
import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.laboratory import records
from tests.laboratory.quality import grid
from tests.laboratory.quality.tasks import ASIDE, TASKS


def main() -> int:
    """Runs the program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.laboratory.quality", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="choose the learning rates; nothing else")
    parser.add_argument("--ranks", type=int, default=4, help=f"default 4; the page has {grid.RANKS}")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS),
                        default=[task for task in TASKS if task not in ASIDE],
                        help=f"default: all but {' and '.join(ASIDE)}")
    parser.add_argument("--algorithms", nargs="+", choices=list(grid.trainable()), default=list(grid.rows()),
                        help="default: all of ours; gradient_allreduce comes by itself", metavar="NAME")
    parser.add_argument("--splits", nargs="+", choices=grid.SPLITS, default=list(grid.SPLITS), help="default: both")
    parser.add_argument("--seeds", type=int, default=len(grid.SEEDS), help=f"default {len(grid.SEEDS)}")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no training begins")
    parser.add_argument("--output", default=records.FOLDER, help="folder of the records; default: the repository's")
    parser.add_argument("--cells", help=argparse.SUPPRESS)          # set if this process is a rank
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "tests.laboratory.quality", *sys.argv[1:]])
    if options.cells:
        from tests.laboratory.quality import rank

        rank.run(options.cells, options.output, os.environ["QUALITY_COMMAND"], options.until)
        return 0
    found = grid.recorded(options.output)
    if options.tune:
        wanted, ranks = grid.tuning(options.tasks), 4
    else:
        names = list(dict.fromkeys([grid.REFERENCE, *options.algorithms]))
        wanted = grid.cells(options.tasks, names, options.ranks, options.splits, range(options.seeds), found)
        ranks = options.ranks
    todo = grid.missing(wanted, found)
    print(f"{len(wanted) - len(todo)} of {len(wanted)} trainings have a record", flush=True)
    if not todo:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        cells = Path(folder, "cells.json")
        cells.write_text(json.dumps(todo))
        until = time.time() + min(60 * options.minutes, 1e9)
        run = [sys.executable, "-m", "bagua_hvd.runner.launch", "-np", str(ranks), sys.executable, "-m",
               "tests.laboratory.quality", "--cells", str(cells), "--until", str(until), "--output",
               str(options.output)]
        return subprocess.run(run, env={**os.environ, "OMP_NUM_THREADS": "1", "QUALITY_COMMAND": command}).returncode


if __name__ == "__main__":
    sys.exit(main())
