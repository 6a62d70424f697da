"""A job of real processes with an injected fault, and its results."""
import json
import os
import shlex
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import worker
from bagua_hvd.job.rendezvous import Rendezvous
from ranks import job_environment
from zygote import Zygote

HERE = Path(__file__).parent
SIZE = 3
# Limit for each wait for a required event; more than any limit of the job itself.
PATIENCE_SECONDS = 90


@dataclass
class Settings:
    """limit: seconds, the job's HOROVOD_GLOO_TIMEOUT_SECONDS and BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS. environment: more
    variables. output: where all ranks print; None: each into a file. descriptors: limits on their number, by rank."""

    limit: float = 10
    environment: dict = field(default_factory=dict)
    output: str | None = None
    descriptors: dict = field(default_factory=dict)


def make_zygote(folder):
    """The process from which ranks are forked: with torch, and a wall clock that can jump."""
    library = Path(folder) / "wall_clock.so"
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    subprocess.run([*compiler, "-shared", "-fPIC", "-O1", HERE / "wall_clock.c", "-o", library, "-ldl"], check=True)
    return Zygote("bagua_hvd.torch", LD_PRELOAD=str(library))


def alive(pid):
    """Whether the process runs or is stopped, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def children_of(pids):
    """Running processes started by these, except these themselves."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if parent in pids and int(name) not in pids and alive(name):
            found.append(int(name))
    return found


class Job:
    """SIZE ranks on one host, or each on one of `hosts` (HostLinks), which start on construction. A context manager.

    Attributes:
        board: worker.Board. hosts. settings.
    """

    def __init__(self, folder, zygote, seed, settings, hosts=None):
        self.folder, self.settings, self.hosts = Path(folder), settings, hosts
        self.board = worker.Board.create(self.folder / "board", SIZE)
        secret = os.urandom(32)
        self._rendezvous = Rendezvous(secret, hosts[0].bridge_address if hosts else "127.0.0.1")
        self._processes = []
        for rank in range(SIZE):
            extra = {
                "HOROVOD_GLOO_TIMEOUT_SECONDS": str(settings.limit), "HOROVOD_START_TIMEOUT": str(PATIENCE_SECONDS),
                "BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS": str(settings.limit), **settings.environment,
            }
            if hosts:
                extra.update(self._host_environment(rank))
            environment = job_environment(rank, SIZE, self._rendezvous.port, secret, extra)
            environment["PYTHONPATH"] = os.pathsep.join([str(HERE), environment["PYTHONPATH"]])
            arguments = {
                "folder": str(self.folder), "seed": seed, "namespace": hosts[rank].namespace if hosts else None,
                "descriptors": settings.descriptors.get(rank), "seconds": 1.25 * settings.limit,
            }
            output = settings.output or self.folder / f"output.{rank}"
            self._processes.append(zygote.start(worker.__file__, "work", arguments, environment, output))

    def _host_environment(self, rank):
        return {
            "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1", "HOROVOD_CROSS_RANK": str(rank),
            "HOROVOD_CROSS_SIZE": str(SIZE), "HOROVOD_GLOO_IFACE": "eth0",
            "BAGUA_HVD_HOST_ID": self.hosts[rank].namespace,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": self.hosts[0].bridge_address,
        }

    def signal(self, rank, number):
        """Sends a signal, unless the process has ended."""
        self._processes[rank].signal(number)

    def act(self, rank, function):
        """Makes the rank call one of worker.ACTS before its next step."""
        self.board.acts[rank] = 1 + worker.ACTS.index(function)

    def has_ended(self, rank):
        """Whether the rank's process has ended."""
        return self._processes[rank].poll() is not None

    def wait_for_steps(self, more):
        """Waits until every rank has made this many more steps. False: a rank ended, or PATIENCE_SECONDS passed."""
        goal = self.board.steps + more
        return self._wait(lambda: (self.board.steps >= goal).all(),
                          unless=lambda: any(map(self.has_ended, range(SIZE))))

    def wait_for_end(self, ranks):
        """Waits until these ranks have ended. False: PATIENCE_SECONDS passed."""
        return self._wait(lambda: all(map(self.has_ended, ranks)))

    def _wait(self, condition, unless=lambda: False):
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if unless() or time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def events(self, rank):
        """The events that the rank wrote: a list of dicts."""
        path = self.folder / f"events.{rank}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        """Kills all remaining processes; idempotent. Returns the ranks among them, and the processes they started."""
        pids = {process.pid for process in self._processes}
        left = [f"rank {rank}" for rank in range(SIZE) if not self.has_ended(rank)]
        left += [f"process {pid} of a rank" for pid in children_of(pids)]
        for process in self._processes:
            process.kill()
            process.wait()
        self._rendezvous.close()
        return left
