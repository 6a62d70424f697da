"""A task of the barrier stage: agrees with the others on the ranks, and starts its rank as a process.

The rank needs its own process, since Spark reuses its Python workers, and frameworks cannot be started twice. Three
connections lead to the driver (runner.py): two carry the output of the process; the third carries its exit code. When
the driver closes that one, the process is killed with its descendants.
"""
import base64
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bagua_hvd.job import channel
from bagua_hvd.job.environment import host_hash
from bagua_hvd.runner.common.util.hosts import SlotInfo, slots_on
from bagua_hvd.runner.job import worker_environment
from bagua_hvd.runner.processes import kill_sessions

_CONNECT_SECONDS = 30
_NOT_FOUND = 127        # the shell's exit code


@dataclass(frozen=True)
class Task:
    """First message of a task. worker: its rank."""

    worker: int


@dataclass(frozen=True)
class Output:
    """The rank's output to "stdout" or "stderr" follows, until its end."""

    worker: int
    stream: str


@dataclass(frozen=True)
class Begin:
    """To a task: start the process. If the driver closes the connection instead, the process must be killed."""


@dataclass(frozen=True)
class Ended:
    """A task's process has ended. reason: it could not be started."""

    exit_code: int
    reason: str | None = None


@dataclass(frozen=True)
class Job:
    """Data for a task.

    Attributes:
        address: of the driver. server_port, rendezvous_port: there. secret_key: base64 bytes.
        env: of the ranks, in addition to the task's own environment. path: the driver's sys.path.
        executable: the Python of the ranks; None: the task's.
        interfaces: names separated by commas; "": those towards the driver.
    """

    address: str
    server_port: int
    rendezvous_port: int
    secret_key: bytes
    env: dict[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    executable: str | None = None
    interfaces: str = ""


def places(hosts_of: Sequence[str]) -> tuple[list[int], list[SlotInfo]]:
    """Ranks of the partitions, and SlotInfos of the ranks. The ranks of a host are consecutive.

    Args:
        hosts_of: the host of each partition.
    """
    hosts = list(dict.fromkeys(hosts_of))
    order = sorted(range(len(hosts_of)), key=lambda partition: hosts.index(hosts_of[partition]))
    return [order.index(partition) for partition in range(len(hosts_of))], slots_on([hosts_of[i] for i in order])


def run_task(job: Job, context: Any) -> tuple[int, int]:
    """Starts the rank and waits for its end; returns (rank, exit code). context: the BarrierTaskContext.

    Raises:
        RuntimeError: the driver has ended the job, or Spark retries the stage.
        OSError: the driver cannot be reached.
    """
    gpus = context.resources()["gpu"].addresses if "gpu" in context.resources() else []
    gathered = [json.loads(text) for text in context.allGather(json.dumps([host_hash(), gpus]))]
    ranks, slots = places([host for host, _ in gathered])
    slot = slots[ranks[context.partitionId()]]
    env = worker_environment({**os.environ, **job.env}, slot, job.address, job.rendezvous_port, job.secret_key,
                             job.interfaces)
    env["PYTHONPATH"] = os.pathsep.join([*sys.path, *(path for path in job.path if os.path.isdir(path))])
    if gpus:        # those of all ranks on the host, in rank order: a rank uses the one of its local rank
        by_rank = sorted(range(len(gathered)), key=ranks.__getitem__)
        env["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(
            gpu for i in by_rank if gathered[i][0] == slot.hostname for gpu in gathered[i][1]))
    return slot.rank, _run(job, slot.rank, env)


def _run(job, rank, env):
    def connect(hello):
        connection = channel.Connection(job.address, job.server_port, base64.b64decode(job.secret_key),
                                        _CONNECT_SECONDS)
        connection.send(hello)
        return connection

    task = connect(Task(rank))
    if task.receive(Begin) is None:
        raise RuntimeError("the driver has ended the job; Spark may have lost an executor, with ranks on it")
    stdout, stderr = connect(Output(rank, "stdout")), connect(Output(rank, "stderr"))
    command = [job.executable or sys.executable, "-m", "bagua_hvd.runner.function_task", f":{job.server_port}"]
    try:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=stdout.fileno(),
                                   stderr=stderr.fileno(), start_new_session=True)
    except OSError as error:
        ended = Ended(_NOT_FOUND, f"{socket.gethostname()} cannot run {command[0]}: {error.strerror}")
    else:
        ended = Ended(_wait(process, task))
    for connection in (stdout, stderr):
        connection.close()
    with suppress(OSError):     # the driver has closed the connection
        task.send(ended)
    task.close()
    return ended.exit_code


def _wait(process, task):
    """Waits for the exit code. Kills the process when the driver closes the connection."""
    ended = threading.Event()
    watch = threading.Thread(target=_kill_with_driver, args=(task, process.pid, ended), daemon=True)
    watch.start()
    try:
        status = process.wait()
    finally:
        ended.set()
        kill_sessions({process.pid})        # its background processes, and itself if Spark interrupts this task
    return status if status >= 0 else 128 - status


def _kill_with_driver(task, session, ended):
    task.receive()      # the driver sends nothing here, so it has ended the job
    if not ended.is_set():
        kill_sessions({session})
