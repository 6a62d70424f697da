"""Measures goodput with slow ranks and with ranks that die and are replaced: a table.

    python tests/elastic/goodput.py [--seconds 180] [--step 0.4] [--only ROW]

Eight ranks train a perceptron on this machine; a step takes 0.4 s, most of it sleep, and 1.6 s on one rank. Every 30 s
another rank is killed, and a new process replaces it; with a quorum, that process already runs. Goodput: the ranks'
steps that are part of the model, relative to those of eight equally fast ranks without failures. The loss is that of
the test data at the end.
"""
import argparse
import json
import os
import random
import signal
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
from tests.laboratory.quality.tasks import TASKS  # noqa: E402

RANKS, INTERVAL, OVERLAP, SLOW, KILL_SECONDS, BATCH = 8, 16, 4, 4, 30, 16
SLOW_HOST = "127.0.0.9"
KINDS = {
    "diloco, undisturbed": dict(kind="diloco", slow=False, kills=False),
    "diloco": dict(kind="diloco"),
    "gradient_allreduce, every_step": dict(kind="gradient_allreduce"),
    "diloco, quorum": dict(kind="diloco quorum"),
}


class Worker:
    """One rank; logs the time and the number of steps in the model by then, of all ranks or (by_itself) of this one."""

    def __init__(self):
        import bagua_hvd.torch as hvd
        from bagua_hvd.algorithms import DiLoCo

        self.hvd = hvd
        self.folder, self.kind = Path(os.environ["TEST_LOG"]), os.environ["TEST_KIND"]
        self.seconds = float(os.environ["TEST_STEP"])
        self.log_file = open(self.folder / f"{os.getpid()}.log", "a", buffering=1)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.task = TASKS["tabular"]()
        self.model = self.task.make()
        self.rows = self.task.parts["train"][0].shape[0]
        self.random = torch.Generator().manual_seed(os.getpid())
        if "TEST_GO" in os.environ:
            wait_until(Path(os.environ["TEST_GO"]).exists, 1000)
        hvd.init()
        slow_host = os.environ["TEST_SLOW_HOST"]
        self.slow = bool(os.environ.get("TEST_SLOW")) or os.environ.get("HOROVOD_HOSTNAME") == slow_host
        self.seconds *= SLOW if self.slow else 1
        quorum = {"quorum": 6, "grace_s": self.seconds} if "quorum" in self.kind else {}
        algorithm = self.kind.split()[0]
        if algorithm != "gradient_allreduce":
            algorithm = DiLoCo(INTERVAL, fragments=2, overlap_steps=OVERLAP, full_steps=0, **quorum)
        self.optimizer = hvd.DistributedOptimizer(torch.optim.Adam(self.model.parameters(), 0.004),
                                                  self.model.named_parameters(), algorithm=algorithm)

    def log(self, **words):
        self.log_file.write(json.dumps({"at": time.time(), "slow": self.slow, **words}) + "\n")

    def stops(self):
        return (self.folder / "stop").exists()

    def step(self):
        began = time.monotonic()
        rows = torch.randint(self.rows, (BATCH,), generator=self.random)
        self.optimizer.zero_grad()
        self.task.loss(self.model, *self.task.pairs("train", rows)).backward()
        time.sleep(max(0, self.seconds - (time.monotonic() - began)))       # stands for the computation
        self.optimizer.step()

    def save(self):
        part = self.folder / f"{os.getpid()}.part"
        torch.save(self.model.state_dict(), part)
        os.replace(part, self.folder / "model")

    def by_itself(self):
        self.log(steps=0)
        made = -1                       # in its first step a rank looks for the others
        while not self.stops():
            self.step()
            made += 1
            parts = self.optimizer.reducer.model.scratch["rounds"]._parts
            waiting = max(part.steps + (part.sent[0] if part.sent else 0) for part in parts)
            self.log(steps=made - waiting)
        if made > INTERVAL:
            for part in parts:
                part.x.write(part.outer()[0])
            self.save()

    def in_a_job(self):
        hvd = self.hvd
        every_step = self.kind == "gradient_allreduce"
        state = hvd.elastic.TorchState(self.model, self.optimizer, every_step=every_step, step=0, steps=0)

        @hvd.elastic.run
        def train(state):
            while True:
                self.log(steps=state.steps)
                self.step()
                state.step += 1
                state.steps += hvd.size()
                if state.step % INTERVAL == 0 and not every_step:
                    state.commit()
                if state.step % 8 == 0 and hvd.broadcast_object(self.stops(), name="stop"):
                    return

        train(state)
        if every_step or hvd.consensus(self.model):
            self.save()


class Goodput:
    """One training."""

    def __init__(self, launcher, folder, options, kind, slow=True, kills=True):
        self.launcher, self.folder, self.options = launcher, folder, options
        self.kind, self.slow, self.kills = kind, slow, kills
        self.random = random.Random(0)
        self.environment = {"TEST_LOG": str(folder), "TEST_KIND": kind, "TEST_STEP": str(options.step),
                            "OMP_NUM_THREADS": "1", "HOROVOD_START_TIMEOUT": "200",
                            "TEST_SLOW_HOST": SLOW_HOST if slow else "nowhere"}

    def logs(self):
        """{pid: lines}."""
        found = {int(file.stem): file.read_text().split("\n")[:-1] for file in self.folder.glob("*.log")}
        return {pid: [json.loads(line) for line in lines] for pid, lines in found.items() if lines}

    def run(self):
        """Runs it; returns (goodput, test loss, kills)."""
        start, replace, end = self.by_themselves() if "quorum" in self.kind else self.one_job()
        start()
        # All ranks train.
        wait_until(lambda: sum(log[-1]["steps"] > 0 for log in self.logs().values()) >= RANKS, 500)
        began, before = time.time(), self.steps()
        killed = []
        while time.time() < began + self.options.seconds:
            due = began + KILL_SECONDS * (len(killed) + 1)
            if self.kills and time.time() > due:
                alive = [pid for pid, log in self.logs().items() if not log[0]["slow"] and pid not in killed]
                killed.append(self.random.choice(alive))
                os.kill(killed[-1], signal.SIGKILL)
                replace(killed[-1])
            time.sleep(0.2)
        seconds, steps = time.time() - began, self.steps() - before
        (self.folder / "stop").touch()
        end()
        task = TASKS["tabular"]()
        model = task.make()
        model.load_state_dict(torch.load(self.folder / "model"))
        sums = task.sums(model, "test", torch.arange(len(task.parts["test"][0])))
        return steps * self.options.step / seconds / RANKS, (sums[0] / sums[2]).item(), len(killed)

    def steps(self):
        counts = [max(line["steps"] for line in log) for log in self.logs().values()]
        return sum(counts) if "quorum" in self.kind else max(counts)

    def by_themselves(self):
        environment = {**os.environ, **self.environment, "PYTHONPATH": str(ROOT),
                       "_HOROVOD_SECRET_KEY": "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0IHNlYw=="}
        popens = {}

        def spawn(*command, **variables):
            popen = subprocess.Popen([sys.executable, *command], env={**environment, **variables},
                                     stdout=subprocess.PIPE)
            popens[popen.pid] = popen
            return popen

        server = spawn("-m", "bagua_hvd.runner.quorum_server")
        environment["BAGUA_HVD_QUORUM_SERVER"] = f"127.0.0.1:{server.stdout.readline().split()[-1].decode()}"
        spares = []

        def spare():
            go = self.folder / f"go.{len(popens)}"
            spares.append((spawn(__file__, "worker", TEST_GO=str(go)), go))

        def start():
            for rank in range(RANKS):
                spawn(__file__, "worker", TEST_SLOW="1" if self.slow and rank == 0 else "")
            spare()

        def replace(victim):
            popens[victim].wait()
            spares.pop()[1].touch()
            spare()

        def end():
            spares.pop()[0].kill()
            for popen in popens.values():
                if popen is not server:
                    popen.wait(100)
            server.kill()
            server.wait()

        return start, replace, end

    def one_job(self):
        hosts = dict.fromkeys([SLOW_HOST, *(f"127.0.0.{10 + place}" for place in range(RANKS - 1))], 1)
        job = ElasticJob(self.launcher, hosts)
        places = iter(range(40, 200))

        def start():
            job.start("--min-np", 2, "--max-np", RANKS, command=[__file__, "worker"], env=self.environment)

        def replace(victim):
            hosts[f"127.0.0.{next(places)}"] = 1
            job.set_hosts(hosts)

        def end():
            assert job.finish(100) == 0, job.text

        return start, replace, end


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--step", type=float, default=0.4)
    parser.add_argument("--only", default="", help="the row of this name")
    options = parser.parse_args()
    print("| training | goodput | test loss | kills |\n|---|---:|---:|---:|", flush=True)
    for name, arguments in KINDS.items():
        if options.only in ("", name):
            with tempfile.TemporaryDirectory(prefix="goodput.") as folder:
                launcher = Launcher(Path(folder))
                try:
                    goodput, loss, kills = Goodput(launcher, Path(folder), options, **arguments).run()
                finally:
                    launcher.close()
            print(f"| {name} | {100 * goodput:.1f} % | {loss:.4f} | {kills} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        worker = Worker()
        (worker.by_itself if "quorum" in worker.kind else worker.in_a_job)()
    else:
        main()
