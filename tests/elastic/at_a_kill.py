"""Compares how several systems recover from the loss of a rank: a table for docs/results/faults.md.

    python tests/elastic/at_a_kill.py [--repetitions 5] [--only TEXT] [--torchft /path/of/a/python/that/has/torchft]

Three ranks train a small perceptron on this machine; a step takes 20 ms, most of it sleep. Rank 1 is killed. Measured:
the seconds from the kill to the end of the first new step, and how many completed steps are repeated.
"""
import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT)]

import torch  # noqa: E402

from elastic_job import ElasticJob  # noqa: E402
from launcher import Launcher, wait_until  # noqa: E402

RANKS, STEP_SECONDS, CHECKPOINT_STEPS = 3, 0.02, 50
HOSTS = {"localhost": 1, "127.0.0.2": 1, "127.0.0.3": 1}


def make():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    return model, torch.optim.Adam(model.parameters(), 1e-3)


class Log:
    """Records the steps that this process has completed."""

    def __init__(self, rank):
        self._file = open(Path(os.environ["TEST_LOG"]) / f"{os.getpid()}.log", "a", buffering=1)
        self._rank = rank

    def __call__(self, step):
        self._file.write(json.dumps({"at": time.time(), "rank": self._rank, "step": step}) + "\n")


def backward(model):
    x = torch.randn(16, 64)
    torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    time.sleep(STEP_SECONDS)


def stops(step):
    return step > 100_000 or os.path.exists(os.environ["TEST_STOP"])


def elastic(every_step):
    import bagua_hvd.torch as hvd

    model, optimizer = make()
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, every_step=every_step, step=0)

    @hvd.elastic.run
    def train(state):
        log = Log(hvd.rank())
        while not hvd.broadcast_object(stops(state.step), name="stop"):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            log(state.step)
            state.step += 1
            if not every_step and state.step % CHECKPOINT_STEPS == 0:
                state.commit()

    train(state)


def torchrun(backend):
    """Like PyTorch's tutorial of torchrun: periodic checkpoints, from which all ranks restart."""
    if backend == "bagua":
        import bagua_hvd.torch.distributed  # noqa: F401  (registers the backend)

    torch.distributed.init_process_group(backend)
    model, optimizer = make()
    checkpoint, step = Path(os.environ["TEST_LOG"]) / "checkpoint", 0
    if checkpoint.exists():
        kept = torch.load(checkpoint)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step = kept["step"]
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    log = Log(torch.distributed.get_rank())
    while not stops(step):
        optimizer.zero_grad()
        backward(ddp)
        optimizer.step()
        log(step)
        step += 1
        if step % CHECKPOINT_STEPS == 0 and torch.distributed.get_rank() == 0:
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(kept, f"{checkpoint}.part")
            os.replace(f"{checkpoint}.part", checkpoint)


def torchft():
    from datetime import timedelta

    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    model, optimizer = make()
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(kept):
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"rank{os.environ['RANK']}", rank=0, world_size=1, store_addr="localhost", store_port=store.port,
        timeout=timedelta(seconds=10), hostname="localhost")
    log = Log(int(os.environ["RANK"]))
    ddp, wrapped = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    while not stops(step := manager.current_step()):
        wrapped.zero_grad()
        backward(ddp)
        wrapped.step()
        if manager.current_step() > step:
            log(step)
    os._exit(0)


WORKERS = {"every_step": lambda: elastic(True), "commit": lambda: elastic(False),
           "torchrun, bagua": lambda: torchrun("bagua"), "torchrun, gloo": lambda: torchrun("gloo"), "torchft": torchft}


class Run:
    """One training with one system, in a folder."""

    def __init__(self, kind, folder, launcher, python_of_torchft):
        self.kind, self.folder, self.launcher, self.torchft = kind, folder, launcher, python_of_torchft
        self.environment = {**os.environ, "TEST_LOG": str(folder), "TEST_STOP": str(folder / "stop"),
                            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.popens = []

    def spawn(self, *command, **variables):
        self.popens.append(subprocess.Popen(command, env={**self.environment, **variables},
                                            stdout=subprocess.DEVNULL, stderr=open(self.folder / "errors", "a")))
        return self.popens[-1]

    def start(self):
        command = [__file__, self.kind]
        if self.kind in ("every_step", "commit"):
            job = ElasticJob(self.launcher, HOSTS)
            job.start("--min-np", 1, "--max-np", RANKS, command=command, env=self.environment)
        elif self.kind == "torchft":
            code = ("import time; from torchft.coordination import LighthouseServer as L; "
                    "l = L(bind='127.0.0.1:0', min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=100); "
                    "print(l.address(), flush=True); time.sleep(1000)")
            lighthouse = subprocess.Popen([self.torchft, "-c", code], env=self.environment, stdout=subprocess.PIPE,
                                          stderr=subprocess.DEVNULL)
            self.popens.append(lighthouse)
            address = lighthouse.stdout.readline().decode().strip()
            for rank in range(RANKS):
                self.spawn(self.torchft, *command, TORCHFT_LIGHTHOUSE=address, RANK=str(rank))
        else:
            # PyTorch 2.13 uses one store for all attempts: gloo's new workers would read the addresses of dead ones,
            # and wait for them.
            self.spawn(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
                       "--max-restarts", "3", *command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def lines(self):
        """The completed steps of all ranks, sorted by time, with pids."""
        found = [{**json.loads(line), "pid": int(file.stem)} for file in self.folder.glob("*.log")
                 for line in file.read_text().split("\n")[:-1]]
        return sorted(found, key=lambda line: line["at"])

    def measure(self):
        """(seconds to the first new step, number of completed steps that were repeated)."""
        self.start()
        wait_until(lambda: sum(line["step"] >= 60 for line in self.lines()) >= RANKS, 200)
        time.sleep(random.uniform(0, 1))
        victim = next(line["pid"] for line in self.lines() if line["rank"] == 1)
        os.kill(victim, signal.SIGKILL)
        killed = time.time()

        def look():
            """(the last step completed before the kill took effect, the steps completed after it)."""
            lines = self.lines()
            later = [line for line in lines if line["at"] > killed + STEP_SECONDS]
            return max(line["step"] for line in lines if line not in later), later

        wait_until(lambda: any(line["step"] > look()[0] for line in look()[1]), 100)
        last, later = look()
        first = next(line for line in later if line["step"] > last)
        return first["at"] - killed, last + 1 - min(line["step"] for line in later if line["at"] <= first["at"])

    def close(self):
        (self.folder / "stop").touch()
        for popen in reversed(self.popens):
            popen.terminate()           # torchrun stops its workers
            try:
                popen.wait(60)
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--torchft", help="a Python that has torch and torchft")
    options = parser.parse_args()
    print("| system | to the next step: median s | max s | steps repeated: median | max |\n|---|---:|---:|---:|---:|")
    for kind in WORKERS:
        if options.only not in kind or kind == "torchft" and not options.torchft:
            continue
        found = []
        for _ in range(options.repetitions):
            with tempfile.TemporaryDirectory(prefix="kill.") as folder:
                launcher = Launcher(Path(folder))
                run = Run(kind, Path(folder), launcher, options.torchft)
                try:
                    found.append(run.measure())
                finally:
                    run.close()
                    launcher.close()
        seconds, steps = zip(*found, strict=True)
        print(f"| {kind} | {statistics.median(seconds):.2f} | {max(seconds):.2f} | {statistics.median(steps):g} | "
              f"{max(steps)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in WORKERS:
        WORKERS[sys.argv[1]]()
    else:
        main()
