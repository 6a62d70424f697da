"""Elastic jobs with every_step=True that lose, stop and add workers at random, and one process that replays them.

    python tests/support/chaos.py [--runs 20] [--seed 0]

Four to six ranks run on two or three hosts, which are names of this machine. Four times a worker is killed, at a random
time or within a backward pass; or stopped, for less than a second or forever; or a host joins. When a worker is lost,
baguarun removes its host with all workers there. The workers log who took part in which step; one process that replays
these logs must reach the same final weights. No step may be lost, and none repeated after a surviving worker has
completed it.

Prints a line for each run, with the time from each loss to the next completed step. Exits with 1 on any error.
"""
import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from elastic_job import ElasticJob
from every_step_worker import COUNT, loss_of, make_model, make_optimizer
from launcher import Launcher, runs, wait_until
from preloaded import Preloaded

WORKER = Path(__file__).with_name("every_step_worker.py")
HOSTS = ((2, 2), (2, 2, 1), (2, 2, 2), (3, 3))      # workers on each host
EVENTS = ("kill", "die", "kill", "die", "stop", "silent", "kill beside a stopped one", "join")
SILENT_SECONDS = 6      # without heartbeats; longer than a busy machine delays a process
_READ = {}      # what read() has read of each file: [bytes, events]
TOLERANCE = 1e-7        # float64: different order of additions, 2,000 steps; a lost or repeated step is 1e-4


def read(folder):
    """The events of all workers by pid, sorted by start time."""
    logs = []
    for path in folder.glob("*.log"):
        seen = _READ.setdefault(path, [0, []])
        with path.open("rb") as file:
            file.seek(seen[0])
            whole = file.read().rpartition(b"\n")[0]     # omits a line that is still being written
        if whole:
            seen[0] += len(whole) + 1
            seen[1] += map(json.loads, whole.split(b"\n"))
        logs.append(list(seen[1]))
    return {log[0]["pid"]: log for log in sorted((log for log in logs if log), key=lambda log: log[0]["at"])}


def generations(logs):
    """For each rendezvous, by pid, each member's part until the next one."""
    found, begins = {}, {}
    for pid, log in logs.items():
        completed = None
        for event in log:
            if event["event"] == "enter":
                begins.setdefault(event["scope"], event["at"])
                part = found.setdefault(event["scope"], {})[pid] = {
                    "rank": event["rank"], "size": event["size"], "step": event["step"], "completed": completed,
                    "tries": {}, "done": []}
                completed = event["step"]
            elif event["event"] == "try":
                part["tries"][event["step"]] = event["epoch"], event["indices"]
            else:
                part["done"].append(event["step"])
                completed = event["step"] + 1
    return [found[scope] for scope in sorted(found, key=begins.get)]


def replay(model_name, logs):
    """(weights, buffers by pid, number of recoveries from unequal steps). AssertionError: see the module."""
    torch.set_num_threads(1)        # several replays share a busy machine
    model = make_model(model_name)
    optimizer = make_optimizer(model)
    buffers, uneven, step, seen = {}, 0, 0, {}
    chain = generations(logs)
    for place, parts in enumerate(chain):
        members = sorted(parts, key=lambda pid: parts[pid]["rank"])
        assert {part["step"] for part in parts.values()} == {step}, (step, parts)
        completed = [parts[pid]["completed"] for pid in members]
        known = [steps for steps in completed if steps is not None]
        assert not known or max(known) == step, f"step {step} is lost or repeated: {completed}"
        uneven += len(set(known)) > 1
        if place == 0:
            buffers = {pid: [each.clone() for each in model.buffers()] for pid in members}
        elif len(set(completed)) > 1:       # all receive those of the first worker that is ahead
            source = buffers[members[completed.index(step)]]
            buffers = {pid: [each.clone() for each in source] for pid in members}
        # Skips steps that only killed workers completed, and so no survivor has.
        end = chain[place + 1][next(iter(chain[place + 1]))]["step"] if place + 1 < len(chain) else max(
            max(part["done"], default=-1) for part in parts.values()) + 1
        for current in range(step, end):
            assert len(members) == parts[members[0]]["size"], "a member of a completed step left no log"
            gradients = []
            for pid in members:
                epoch, indices = parts[pid]["tries"][current]
                seen.setdefault(epoch, []).append(indices)
                for buffer, own in zip(model.buffers(), buffers[pid], strict=True):
                    buffer.copy_(own)
                model.zero_grad()
                loss_of(model, indices).backward()
                gradients.append([parameter.grad.clone() for parameter in model.parameters()])
                buffers[pid] = [each.clone() for each in model.buffers()]
            for parameter, of_ranks in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
                parameter.grad = sum(of_ranks) / len(members)
            optimizer.step()
        step = end
    for epoch in sorted(seen)[:-1]:         # the last one may be incomplete
        indices = [index for share in seen[epoch] for index in share]
        twice = len(indices) - COUNT        # after each rendezvous the rest is padded
        assert set(indices) == set(range(COUNT)) and twice < 12 * len(chain), (epoch, twice)
    return dict(model.named_parameters()), buffers, uneven


def entered(log):
    """The last rendezvous of a worker."""
    return next(event for event in reversed(log) if event["event"] == "enter")


def has_recovered(folder, victim, others):
    """Whether the victim is dead, and the others have joined a rendezvous since."""
    logs = read(folder)
    return not runs(victim) and all(entered(logs[pid])["at"] > logs[victim][-1]["at"] for pid in others)


def next_step(logs, victim):
    """Seconds from the worker's last event to the others' first step after the next rendezvous."""
    scope, died = entered(logs[victim])["scope"], logs[victim][-1]["at"]
    after = []
    for pid, log in logs.items():
        scopes = [event["scope"] for event in log if event["event"] == "enter"]
        if pid != victim and scope in scopes[:-1]:
            place = [event.get("scope") for event in log].index(scopes[scopes.index(scope) + 1])
            after += [event["at"] for event in log[place:] if event["event"] == "done"][:1]
    return min(after) - died


def start(job, logs, model_name, fewest, most, python=(sys.executable,), **variables):
    """Starts an ElasticJob of every_step_worker.py."""
    job.start("--min-np", fewest, "--max-np", most, command=[WORKER, model_name], python=python,
              env={"TEST_LOG": str(logs), "OMP_NUM_THREADS": "1", "BAGUA_DEFAULT_BUCKET_SIZE": "100000", **variables})


def check(job, logs, model_name):
    """(an ended job's logs, its number of recoveries from unequal steps). AssertionError: see the module."""
    found = read(logs)
    weights, buffers, uneven = replay(model_name, found)
    names = [name for name, _ in make_model(model_name).named_buffers()]
    ended = {pid: torch.load(file) for pid in found if (file := logs / f"{pid}.pt").exists()}
    assert ended, job.text
    for pid, its in ended.items():
        for name, expected in [*weights.items(), *zip(names, buffers[pid], strict=True)]:
            torch.testing.assert_close(its[name], expected, rtol=TOLERANCE, atol=TOLERANCE)
    return found, uneven


class Chaos:
    """One job. After run(): steps, uneven (recoveries from unequal steps), pauses, happened (Counter of EVENTS).

    Args:
        model_name: see every_step_worker.py. generator: random.Random. folder: for this job only.
        python: the command that runs a worker.
    """

    def __init__(self, model_name, generator, folder, python=(sys.executable,)):
        self._model_name, self._generator, self._python = model_name, generator, python
        self._launcher = Launcher(Path(folder))
        self._logs = Path(folder) / "logs"
        self._logs.mkdir()
        slots = generator.choice(HOSTS)
        self._hosts = dict(zip(("localhost", "127.0.0.2", "127.0.0.3"), slots, strict=False))
        self._most = sum(slots)
        self._job = ElasticJob(self._launcher, self._hosts)
        self._joined = 0
        self._killed = []
        self.happened = Counter()

    def run(self):
        """Runs the job. AssertionError: see the module."""
        try:
            start(self._job, self._logs, self._model_name, 1, self._most, self._python,
                  BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS=str(SILENT_SECONDS))
            self._job.wait_for("enter", self._most, 240)
            for _ in range(4):
                time.sleep(self._generator.uniform(0.02, 0.6))
                self._happens(self._generator.choice(EVENTS))
            time.sleep(self._generator.uniform(0, 0.5))
            assert self._job.finish(120) == 0, self._job.text
            found, self.uneven = check(self._job, self._logs, self._model_name)
            self.steps = max(event["step"] for log in found.values() for event in log if event["event"] == "done") + 1
            self.pauses = [next_step(found, victim) for victim in self._killed]
        finally:
            self._launcher.close()

    def _alive(self):
        """{pid: its log} of the training workers."""
        return {pid: log for pid, log in read(self._logs).items() if runs(pid)}

    def _happens(self, event):
        alive = self._alive()
        if event == "join" or len({entered(log)["host"] for log in alive.values()}) == 1:
            self.happened["join"] += 1
            self._join(wait=True)
            return
        self.happened[event] += 1
        pids = sorted(alive)
        victim = self._generator.choice(pids)
        if event == "stop":
            with stopped(victim):
                time.sleep(self._generator.uniform(0.02, 1))
            return
        others = [pid for pid in pids if entered(alive[pid])["host"] != entered(alive[victim])["host"]]
        with stopped(self._generator.choice(others)) if "beside" in event else contextlib.nullcontext():
            number = {"die": signal.SIGUSR1, "silent": signal.SIGSTOP}.get(event, signal.SIGKILL)
            os.kill(victim, number)
            if "beside" in event:
                time.sleep(self._generator.uniform(0.1, 1))
        wait_until(lambda: self._is_over(victim), 120)
        if event in ("kill", "die"):
            self._killed.append(victim)
        if self._generator.random() < 0.7:
            self._join(wait=self._generator.random() < 0.7)

    def _is_over(self, victim):
        """Whether the victim is dead, its host has no workers, and the others have joined a rendezvous since."""
        logs, alive = read(self._logs), self._alive()
        host = entered(logs[victim])["host"]
        return alive and has_recovered(self._logs, victim, alive) and host not in {
            entered(log)["host"] for log in alive.values()}

    def _join(self, wait):
        """Adds a host with one or two workers."""
        before = len(read(self._logs))
        slots = min(self._generator.choice((1, 2)), self._most - len(self._alive()))
        if slots == 0:
            return
        name = f"127.0.0.{20 + self._joined}"
        self._joined += 1
        self._hosts[name] = slots
        self._job.set_hosts(self._hosts)
        if wait:
            slowly = self._logs / "slowly"
            slowly.touch()
            wait_until(lambda: len(read(self._logs)) >= before + slots, 240)
            slowly.unlink()


@contextlib.contextmanager
def stopped(pid):
    """The process is stopped within this context."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with Preloaded() as python:
        sys.exit(run(range(options.seed, options.seed + options.runs), python))


def run(seeds, python):
    """Runs all seeds; returns whether any failed."""
    pauses, happened, failed = [], Counter(), 0
    for seed in seeds:
        model_name = ("mlp", "gru")[seed % 2]
        folder = tempfile.mkdtemp(prefix="chaos.")
        try:
            chaos = Chaos(model_name, random.Random(seed), folder, python)
            chaos.run()
            pauses += chaos.pauses
            happened += chaos.happened
            print(f"{seed} {model_name}: {chaos.steps} steps, {dict(chaos.happened)}, some ahead in {chaos.uneven} "
                  f"recoveries, next step after {', '.join(f'{pause:.2f}' for pause in chaos.pauses)} s", flush=True)
            shutil.rmtree(folder)
        except AssertionError as error:
            failed += 1
            print(f"{seed} {model_name}: {str(error)[-2000:]}\nlogs: {folder}", flush=True)
    if pauses:
        print(f"{len(seeds)} runs, {failed} wrong; {dict(happened)}; seconds from a kill to the next step: median "
              f"{statistics.median(pauses):.2f}, max {max(pauses):.2f}")
    return failed > 0


if __name__ == "__main__":
    main()
