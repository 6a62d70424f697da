"""run(): calls a function on every rank of a job whose ranks Spark starts in a barrier stage.

The driver hosts the rendezvous, and a server (runner/run_function.py) that sends the ranks the function and receives
results. A task never fails when its rank does, because Spark would repeat the whole stage. Instead the task reports the
failure to the server, the other ranks have a grace period to end by themselves, and when the server closes, remaining
ranks are killed.

A task of the stage agrees with the others on the ranks, and starts its rank as a process: Spark reuses its Python
workers, and frameworks cannot be started twice. Three connections lead to the driver: two carry the output of the
process; the third carries its exit code. When the driver closes that one, the process is killed with its descendants.
"""
import asyncio
import base64
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import pyspark

from bagua_hvd.core import variables
from bagua_hvd.job import channel
from bagua_hvd.job.channel import Hello, make_secret_key
from bagua_hvd.job.environment import host_hash
from bagua_hvd.job.probe import interface_names
from bagua_hvd.job.rendezvous import Rendezvous
from bagua_hvd.job.server import EVERY_INTERFACE, HANDSHAKE_SECONDS
from bagua_hvd.runner.common.util.hosts import SlotInfo, slots_on
from bagua_hvd.runner.common.util.timeout import TimeoutException
from bagua_hvd.runner.job import WorkerFailed, as_horovod_environment, worker_environment
from bagua_hvd.runner.output import Console, LineForwarder, TextStream
from bagua_hvd.runner.processes import kill_sessions
from bagua_hvd.runner.run_function import FunctionServer, pickled

_POLL_SECONDS = 0.1
_CONNECT_SECONDS = 30       # of a task to the driver
_NOT_FOUND = 127            # the shell's exit code
_ARRIVAL_SECONDS = 5        # time for messages of ended ranks to arrive, for each piece
_END_SECONDS = 20           # time for Spark's tasks to end
_NOTICE_SECONDS = 10        # until a message says what the job waits for


def run(fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] = {},  # noqa: B006 (Horovod's)
        num_proc: int | None = None, start_timeout: float | None = None, use_mpi: bool | None = None,
        use_gloo: bool | None = None, extra_mpi_args: str | None = None, env: dict[str, str] | None = None,
        stdout: Any = None, stderr: Any = None, verbose: int = 1, nics: Any = None,
        prefix_output_with_timestamp: bool = False, executable: str | None = None) -> list[Any]:
    """Calls fn(*args, **kwargs) on every rank of a job, one for each task of a barrier stage.

    The ranks are processes of their own on the executors' hosts, where bagua_hvd must be installed. Their output
    appears here, prefixed by the rank.

    Args:
        fn: may call hvd.init(), but need not. Sent by cloudpickle, as by bagua_hvd.run().
        num_proc: number of ranks; None: spark.default.parallelism. Spark must have free slots for all at once.
        start_timeout: seconds to wait for that; None: HOROVOD_SPARK_START_TIMEOUT, or 600.
        env: environment variables of the ranks, in addition to the executors'.
        stdout, stderr: text streams for the ranks' output; None: sys.stdout, sys.stderr.
        nics: names of the allowed interfaces; None: those towards the driver.
        prefix_output_with_timestamp: local time before the prefix. executable: the Python of the ranks.
        use_gloo, verbose: no effect. use_mpi, extra_mpi_args: rejected, since Spark starts the ranks.
    Returns:
        The list of fn's results in rank order.
    Raises:
        Exception: no SparkContext is active. TimeoutException: Spark had no slots for all ranks in time.
        RuntimeError: a rank failed; the text names it, with its traceback if fn raised. ValueError: use_mpi, or no
            number of ranks.
        In all cases no process of the job is left running.
    """
    context = pyspark.SparkContext._active_spark_context
    if context is None:
        raise Exception("Could not find an active SparkContext: run this in a PySpark session (Spark Connect has none)")
    if use_mpi or extra_mpi_args:
        raise ValueError("use_mpi: Spark starts the ranks, not mpirun; leave it out, and extra_mpi_args")
    num_proc = context.defaultParallelism if num_proc is None else num_proc
    if num_proc < 1:
        raise ValueError(f"num_proc={num_proc}: give 1 or more")
    start_timeout = start_timeout or variables.read("HOROVOD_SPARK_START_TIMEOUT")
    secret_key = make_secret_key()
    local = context.master == "local" or context.master.startswith("local[")
    bound, address = ("127.0.0.1",) * 2 if local else (
        EVERY_INTERFACE, context.getConf().get("spark.driver.host").strip("[]"))
    env = {name: str(value) for name, value in (env or {}).items()}
    if sys.modules.get("horovod") is sys.modules["bagua_hvd"]:
        env = as_horovod_environment(env)
    console = Console(TextStream(stdout or sys.stdout), TextStream(stderr or sys.stderr))
    function = pickled(None, fn, tuple(args), dict(kwargs))
    with Rendezvous(base64.b64decode(secret_key), bound) as rendezvous, ExitStack() as stack:
        server = _SparkFunctionServer(secret_key, function, bound, console, prefix_output_with_timestamp,
                                      rendezvous.rank_ended)
        job = Job(address, server.port, rendezvous.port, secret_key, env, tuple(map(os.path.abspath, sys.path)),
                  executable, ",".join(interface_names(nics) or ()))
        stage = _Stage(context, job, num_proc)
        stack.callback(stage.close)
        stack.callback(server.close)        # first: it makes the tasks kill remaining ranks
        stage.wait(server, start_timeout, stderr or sys.stderr)
    if server.failures:
        rank = server.failures[0][0]
        raise server.explained(WorkerFailed(rank, server.exit_codes.get(rank, 1)), own=True)
    return [server.result(rank) for rank in range(num_proc)]


def run_elastic(*args: Any, **kwargs: Any) -> list[Any]:
    """Always raises NotImplementedError: the tasks of a barrier stage start and end together, and none can be added."""
    raise NotImplementedError(
        "bagua_hvd.spark.run_elastic: a barrier stage has a fixed number of tasks, which Spark starts and ends "
        "together; use bagua_hvd.spark.run with checkpoints, or an elastic job by baguarun --host-discovery-script")


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


class _SparkFunctionServer(FunctionServer):
    """A server that also talks to tasks.

        task to server  task (its rank), later ended (exit_code, reason); or
                        output (its rank, stream), then the rank's output
        server to task  begin; or it closes the connection, and the task kills its process

    Attributes:
        exit_codes: {rank: of its process}. begun: ranks that have begun. printing: number of open output streams.
        last_output: time of the last output.
    """

    def __init__(self, secret_key, function, host, console, timestamp, rank_ended):
        self.exit_codes = {}
        self.begun = set()
        self._console = console
        self._timestamp = timestamp
        self._rank_ended = rank_ended
        self._writers = set()       # of all connections but output streams
        self._ending = False
        self.printing = 0
        self.last_output = 0.0
        super().__init__(secret_key, function, host)

    async def serve(self, reader, writer):
        self._writers.add(writer)
        try:
            line = await asyncio.wait_for(reader.readline(), HANDSHAKE_SECONDS)
            said = channel.decode(line, Hello, Task, Output)
            if isinstance(said, Hello):
                await self.serve_rank(said.worker, reader, writer)
            elif isinstance(said, Task):
                await self._watch_task(said.worker, reader, writer)
            elif said.stream in ("stdout", "stderr"):
                self._writers.discard(writer)
                await self._print(LineForwarder(self._console, said.worker, said.stream, self._timestamp), reader)
        finally:
            self._writers.discard(writer)

    async def _print(self, forwarder, reader):
        self.printing += 1
        try:
            while data := await reader.read(1 << 16):
                forwarder.feed(data)
                self.last_output = time.monotonic()
        finally:
            self.printing -= 1
            forwarder.close()

    def end(self):
        """Closes all connections but output streams: the tasks kill remaining ranks, which ends the streams."""
        self._ending = True
        self.loop.call_soon_threadsafe(lambda: [writer.close() for writer in self._writers])

    async def _watch_task(self, rank, reader, writer):
        if rank in self.begun:
            return      # Spark lost an executor, and retries the stage: a job that has begun is not repeated
        self.begun.add(rank)
        writer.write(channel.encode(Begin()))
        line = await reader.readline()
        if not line and self._ending:
            return
        host = writer.get_extra_info("peername")[0].removeprefix("::ffff:")
        said = channel.decode(line, Ended) if line else Ended(
            1, f"Spark's task on {host} is gone, and the rank with it: the executor was killed or lost, or the Spark "
            "job was cancelled; Spark's log tells why")
        code = self.exit_codes[rank] = said.exit_code
        if code != 0:
            self._rank_ended(rank, code)
        if said.reason is not None:
            self.fail(rank, said.reason)
        elif code != 0 and all(rank != other for other, _ in self.failures):     # else the rank said why
            self.fail(rank, None)


class _Stage:
    """The Spark job, started by the constructor. close() ends it."""

    def __init__(self, context, job, num_proc):
        self._context = context
        self._num_proc = num_proc
        self._group = f"bagua_hvd-{uuid.uuid4().hex}"
        self._error = None

        def tasks(_):
            yield run_task(job, pyspark.BarrierTaskContext.get())

        def submit():
            try:
                context.setJobGroup(self._group, f"bagua_hvd: {num_proc} ranks", interruptOnCancel=True)
                context.parallelize(range(num_proc), num_proc).barrier().mapPartitions(tasks).collect()
            except Exception as error:
                self._error = error

        self._thread = pyspark.InheritableThread(target=submit, daemon=True)
        self._thread.start()

    def wait(self, server, start_timeout, stderr):
        """Returns when all tasks have ended, or a rank has failed and the grace period is over. As run()."""
        grace = variables.read("BAGUA_HVD_GRACE_SECONDS")
        begin, noticed = time.monotonic(), False
        while self._thread.is_alive() and not server.failed_for(grace):
            self._thread.join(_POLL_SECONDS)
            waited = 0 if server.begun else time.monotonic() - begin
            if waited > start_timeout:
                raise TimeoutException(
                    f"Spark has not started {self._num_proc} tasks at once for {start_timeout:g} s: give it more "
                    "slots, ask for a smaller num_proc, or give a longer start_timeout (HOROVOD_SPARK_START_TIMEOUT)")
            if waited > _NOTICE_SECONDS and not noticed:
                noticed = True
                print(f"bagua_hvd.spark: waiting until Spark starts {self._num_proc} tasks at once, for "
                      f"{start_timeout:g} s at most (start_timeout); its default parallelism is "
                      f"{self._context.defaultParallelism}", file=stderr, flush=True)
        if self._error is not None and not server.failures:
            raise RuntimeError(f"Spark has ended the job: {self._reason()}") from self._error
        if server.failures:
            server.end()
        began = time.monotonic()
        while (server.printing or server.unfinished and not server.failures) and (
                time.monotonic() < max(began, server.last_output) + _ARRIVAL_SECONDS):
            time.sleep(_POLL_SECONDS)

    def _reason(self):
        """The reason of Spark's error, without Java's stack frames."""
        text = "\n".join(line for line in str(self._error).splitlines() if not line.startswith("\tat "))
        missing = re.search(r"ModuleNotFoundError: No module named '([^']+)'", text)
        if missing or "PYTHON_VERSION_MISMATCH" in text:
            return (f"its Python workers run {self._context.pythonExec!r}, which "
                    + (f"has no module {missing[1]}" if missing else "has another version than the driver's Python")
                    + ": set PYSPARK_PYTHON (or spark.pyspark.python) to a Python like the driver's, "
                    f"{sys.executable}, before the session starts")
        return text

    def close(self):
        if self._thread.is_alive():
            self._context.cancelJobGroup(self._group)
            self._thread.join(_END_SECONDS)


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
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=stdout.socket,
                                   stderr=stderr.socket, start_new_session=True)
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
