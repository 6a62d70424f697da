"""Measures how long an elastic job stalls when ranks are lost or hosts change: a table for docs/results/faults.md.

    python tests/elastic/measure.py [--repetitions 10] [--only TEXT]

One host that acts as several, workers without a framework and with steps of 20 ms. For each run: the seconds from the
event until all ranks of the new size have committed a step, the longest time without a commit by any rank, and how many
committed steps were lost. Exits with 1 if a step was lost, or a recovery took longer than allowed.
"""
import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]

from elastic_job import ElasticJob, with_rank  # noqa: E402
from launcher import Launcher  # noqa: E402

WORKER = [Path(__file__).with_name("plain_worker.py")]
A, B, C = "localhost", "127.0.0.2", "127.0.0.3"
HEARTBEAT_SECONDS = 10
WARM_UP_STEPS = 20


@dataclass
class Event:
    """before, after: the hosts, {name: slots}. signum: the signal for the process of `rank`. allowed: seconds; None: no
    limit is promised."""

    name: str
    before: dict
    after: dict
    rank: int | None = None
    signum: int | None = None
    allowed: float | None = None

    def happen(self, job, workers):
        """Triggers the event; returns its time, in seconds of the wall clock."""
        began = time.time()
        if self.signum is None:
            job.set_hosts(self.after)
        else:
            os.kill(int(with_rank(workers, self.rank).words["pid"]), self.signum)
        return began


THREE, TWO = {A: 1, B: 1, C: 1}, {A: 1, B: 1}
EVENTS = [
    Event("SIGKILL of a worker", THREE, TWO, rank=2, signum=signal.SIGKILL, allowed=5),
    Event("SIGKILL of rank 0", THREE, {B: 1, C: 1}, rank=0, signum=signal.SIGKILL, allowed=5),
    Event(f"SIGSTOP of a worker, heartbeats' limit {HEARTBEAT_SECONDS} s", THREE, TWO, rank=2, signum=signal.SIGSTOP,
          allowed=HEARTBEAT_SECONDS + 5),
    Event("a host is taken away", THREE, TWO),
    Event("a host is added", TWO, THREE),
]


def step_of(event):
    return int(event.words["step"])


def measure(event, folder):
    """(seconds until all ranks have made a step, longest pause in seconds, committed steps lost)."""
    launcher = Launcher(Path(folder))
    try:
        job = ElasticJob(launcher, event.before)
        many, few = len(event.before), len(event.after)
        job.start("-np", many, "--min-np", 1, command=WORKER,
                  env={"BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS": str(HEARTBEAT_SECONDS)})
        workers = job.wait_for("enter", many, size=many)
        job.wait_for("committed", many, step=WARM_UP_STEPS)
        began = event.happen(job, workers)
        entered = job.wait_for("enter", few, size=few)
        first = step_of(entered[0]) + 1
        at = min(float(worker.words["at"]) for worker in entered)

        def committed(step):
            return [float(found.words["at"]) for found in job.of("committed", step=step)
                    if float(found.words["at"]) > at]

        job.wait_for("committed", few, step=first + WARM_UP_STEPS)
        before = max(step_of(found) for found in job.of("committed") if float(found.words["at"]) <= began)
        times = sorted(float(found.words["at"]) for found in job.of("committed"))
        if job.finish() != 0:
            raise RuntimeError(job.text)
        pause = max(later - earlier for earlier, later in zip(times, times[1:], strict=False) if later > began)
        return max(committed(first)) - began, pause, max(0, before - (first - 1))
    finally:
        launcher.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--only", default="", help="events whose names contain this")
    options = parser.parse_args()
    bad = False
    print("| event | runs | to the next step: median s | max s | allowed s | longest pause: median s | max s | steps "
          "lost |\n|---|---|---|---|---|---|---|---|")
    for event in EVENTS:
        if options.only not in event.name:
            continue
        found = []
        for _ in range(options.repetitions):
            with tempfile.TemporaryDirectory() as folder:
                found.append(measure(event, folder))
        seconds, pauses, lost = zip(*found, strict=True)
        bad = bad or any(lost) or (event.allowed is not None and max(seconds) > event.allowed)
        figures = f"{statistics.median(seconds):.2f} | {max(seconds):.2f} | {event.allowed or '-'} | " \
                  f"{statistics.median(pauses):.2f} | {max(pauses):.2f} | {sum(lost)}"
        print(f"| elastic, 3 ranks: {event.name} | {len(found)} | {figures} |", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
