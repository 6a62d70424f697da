"""The launcher's end of the connections to hosts, and the processes that run there.

The ssh client is a process of this host. One thread reads from it and forwards each process's output through a pipe,
so that the supervisor reads local and remote processes alike. Another thread writes, so that a slow network blocks no
caller, and regularly tells the host that the launcher lives.
"""
import fnmatch
import json
import math
import os
import queue
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.core.version import __version__
from bagua_hvd.job.channel import fill
from bagua_hvd.runner.processes import Process
from bagua_hvd.runner.ssh.frames import Begin, Kind, Reader, Ready, Start, pack

LOST = 255      # exit code of processes whose connection was lost: ssh's own
_PING_SECONDS = 5
_READ_NBYTES = 1 << 16
_STDERR_MAX_NBYTES = 1 << 16
_ROOT = str(Path(__file__).resolve().parents[3])
_AGENT = "import sys; sys.path[0] = {root!r}; from bagua_hvd.runner.ssh.agent import main; main()"
# Variables that apply only to the launcher's host, or to its process in another launcher's job: patterns of names.
_NOT_FORWARDED = (
    "BASH_FUNC_*", "SSH_*", "OLDPWD", "PWD", "HOSTNAME", "BAGUA_HVD_HOST_ID", "*CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_*", "OMPI_*", "PMI_*",
    "PMIX_*", "MPI_LOCAL*",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASK_PID", "SLURM_GTIDS", "SLURMD_NODENAME")
EXCLUDE = "BAGUA_HVD_EXCLUDE_ENV"


def ssh_command() -> list[str]:
    """The ssh program with its options. RuntimeError: there is no such program."""
    text = variables.read("BAGUA_HVD_SSH_COMMAND")
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise RuntimeError(f"environment variable BAGUA_HVD_SSH_COMMAND={text!r}: {str(error).lower()}") from None
    if not shutil.which(command[0]):
        remedy = "install OpenSSH's client" if command == ["ssh"] else "correct BAGUA_HVD_SSH_COMMAND"
        raise RuntimeError(f"{command[0]!r} was not found in PATH, and is needed to reach other hosts: {remedy}")
    return command


def flags(port: int | None, identity_file: str | None) -> list[str]:
    """The ssh flags for a port and a private key; None adds no flag."""
    return [*(["-p", str(port)] if port else []), *(["-i", identity_file] if identity_file else [])]


@dataclass(frozen=True)
class HostOptions:
    """How other hosts are reached, from the flags. BAGUA_HVD_SSH_COMMAND replaces `ssh`, and may include options.

    Attributes:
        timeout_seconds: for connecting. silence_seconds: launcher and host give each other up after this time of
            silence. nics: names of allowed interfaces; None: all.
    """

    port: int | None = None
    identity_file: str | None = None
    timeout_seconds: int = 30
    silence_seconds: float = 70
    nics: list[str] | None = None

    def command(self, host: str, remote_command: str | None = None) -> list[str]:
        """The arguments of the ssh client. Options in BAGUA_HVD_SSH_COMMAND take precedence."""
        command = ssh_command()
        for option in ("BatchMode=yes", "StrictHostKeyChecking=accept-new", "ControlMaster=no",
                       "ClearAllForwardings=yes", f"ServerAliveInterval={_PING_SECONDS}",
                       f"ServerAliveCountMax={math.ceil(self.silence_seconds / _PING_SECONDS)}",
                       f"ConnectTimeout={self.timeout_seconds}"):
            command += ["-o", option]
        command += ["-T", "-x", "-a", *flags(self.port, self.identity_file), "--", host]
        return command + ([remote_command] if remote_command else [])

    def trial(self, host: str) -> str:
        """A command for the user to try."""
        return shlex.join([*ssh_command(), *flags(self.port, self.identity_file), host, "true"])


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the launcher's environment for other hosts: without host-specific ones and those in EXCLUDE."""
    patterns = [*_NOT_FORWARDED, *(variables.read(EXCLUDE, environment) or [])]
    return {name: value for name, value in environment.items()
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}


class RemoteProcess:
    """A process on another host, with the members of processes.Process that a supervisor uses."""

    def __init__(self, host: "RemoteHost", number: int, name: Any) -> None:
        self.name = name
        self.exit_code: int | None = None       # as reported by the host
        self.note: str | None = None
        self._host, self._number = host, number
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        self._end_reader, self._end_writer = os.pipe()
        for fd in (self.stdout, self.stderr):
            os.set_blocking(fd, False)
        self._writers = {Kind.STDOUT: stdout, Kind.STDERR: stderr}

    @property
    def place(self) -> str:
        return f"on host {self._host.name}"

    def open_pidfd(self) -> int:
        """A descriptor that becomes readable when the process ends; owned by the caller from now on."""
        return self._end_reader

    def poll(self) -> int | None:
        return self.exit_code

    def signal(self, signum: int) -> None:
        self._host.send(Kind.SIGNAL, self._number, signum)

    def release(self) -> None:
        """Does nothing: there is nothing to free."""

    # Called by the host's reading thread.

    def feed(self, kind: Kind, data: bytes) -> None:
        writer = self._writers.get(kind)
        if writer is None:
            return
        if not data:
            os.close(self._writers.pop(kind))
            return
        try:
            while data:
                data = data[os.write(writer, data):]
        except BrokenPipeError:
            pass        # the supervisor has closed its end

    def end(self, exit_code: int, note: str | None = None) -> None:
        if self.exit_code is None:
            self.note, self.exit_code = note, exit_code
            os.close(self._end_writer)

    def close(self) -> None:
        for kind in list(self._writers):
            self.feed(kind, b"")


class RemoteHost:
    """A host, connected from construction to close().

    Create it in a thread that lives long enough: the kernel ends the ssh client with that thread.

    Attributes:
        name: as ssh knows it.
        error: a sentence that says why there is no connection (any more); None: it exists, or is being made.
        ssh_failed: whether ssh could not reach the host, or lost it.
        host_hash: identifies the machine; None before wait_ready().

    Args:
        environment: the launcher's.
    Raises:
        OSError: no ssh client, no more processes or descriptors.
    """

    def __init__(self, name: str, options: HostOptions, environment: Mapping[str, str],
                 say: Callable[[str], object] = lambda text: None) -> None:
        self.name = name
        self.error: str | None = None
        self.host_hash: str | None = None
        self._options = options
        self._processes: dict[int, RemoteProcess] = {}
        self._requests: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._stderr = b""          # stderr output of ssh and the agent
        self._ready = threading.Event()
        self._say = say
        variables.read(EXCLUDE, environment)        # reports a malformed value now
        # Quoted for the host's login shell, whichever that is.
        remote = f"exec {shlex.quote(sys.executable)} -S -c {shlex.quote(_AGENT.format(root=_ROOT))}"
        self._ssh = Process(name, options.command(name, remote), dict(environment), stdin=subprocess.PIPE)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.send(Kind.BEGIN, 0, Begin(__version__, os.getcwd(), options.silence_seconds))
        self._threads = [threading.Thread(target=work, name=f"{work.__name__} {name}", daemon=True)
                         for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    @property
    def ssh_failed(self) -> bool:
        return self._ssh.exit_code == LOST

    @property
    def ready(self) -> bool:
        """Whether there is a connection now to an agent that can start processes."""
        return self._ready.is_set() and self.error is None

    def send(self, kind: Kind, number: int = 0, payload: object = None) -> None:
        """Sends a frame, or drops it if the connection is lost. Any thread; never blocks."""
        self._outbox.put(pack(kind, number, payload))

    def wait_ready(self, timeout: float) -> bool:
        """Whether the host can start processes. Waits at most `timeout` seconds; False: `error` says why not."""
        if not self._ready.wait(timeout):
            self.error = (f"host {self.name} did not answer within {self._options.timeout_seconds} s: check that "
                          f"`{self._options.trial(self.name)}` works, or raise --start-timeout")
        return self.error is None

    def start(self, name: Any, command: list[str], environment: Mapping[str, str]) -> RemoteProcess:
        """Starts a process, which has ended if there is no connection. environment: in addition to the host's own."""
        with self._lock:
            self._count += 1
            number = self._count
            process = RemoteProcess(self, number, name)
            error = self.error      # read once: _lose() ends every process in the list
            if error is None:
                self._processes[number] = process
        if error is not None:
            process.end(LOST, error)
            process.close()
        else:
            self.send(Kind.START, number, Start(command, forwarded(environment)))
        return process

    def any_left(self) -> bool:
        """Whether a started process still runs."""
        with self._lock:
            return any(process.exit_code is None for process in self._processes.values())

    def request(self, function: str, **arguments: Any) -> Future[Any]:
        """A Future of the result of the agent's function. Its exceptions: ConnectionError: the host was lost;
        RuntimeError: the function failed there.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._count += 1
            number = self._count
            self._requests[number] = future
        self.send(Kind.REQUEST, number, [function, arguments])
        if self.error is not None:
            self._fail_requests()
        return future

    def close(self, timeout: float) -> None:
        """Waits for the end after Kind.FINISH, at most `timeout` seconds; then ends the connection."""
        end = time.monotonic() + timeout
        while self._ssh.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        self._ssh.signal(signal.SIGKILL)
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(timeout=5)
        self._ssh.stdin.close()
        for fd in (self._ssh.stdout, self._ssh.stderr):
            os.close(fd)
        self._ssh.release()

    # ---- threads ------------------------------------------------------------------------------------------------

    def _write(self):
        while True:
            try:
                data = self._outbox.get(timeout=_PING_SECONDS)
            except queue.Empty:
                data = pack(Kind.PING)
            if data is None:
                return
            try:
                while data:
                    data = data[self._ssh.stdin.write(data):]
            except OSError:
                return      # ssh has ended: the reading thread says why

    def _read(self):
        reader = Reader(after_magic=True)
        with selectors.DefaultSelector() as selector:
            for fd in (self._ssh.stdout, self._ssh.stderr):
                selector.register(fd, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, _READ_NBYTES)
                    if not data:
                        selector.unregister(key.fd)
                    elif key.fd == self._ssh.stderr:
                        self._stderr = (self._stderr + data)[-_STDERR_MAX_NBYTES:]
                    else:
                        try:
                            for frame in reader.feed(data):
                                self._handle(*frame)
                        except ValueError as error:
                            self._stderr += f"\nthe host sent malformed data: {error}".encode()
                            selector.unregister(key.fd)
                            self._ssh.signal(signal.SIGKILL)
        while self._ssh.poll() is None:
            time.sleep(0.01)
        self._lose()

    def _handle(self, kind, number, payload):
        if kind in (Kind.STDOUT, Kind.STDERR):
            process = self._processes.get(number)
            if process is not None:
                process.feed(kind, payload)
        elif kind == Kind.SAY:
            said = payload.decode(errors="replace").rstrip("\n").removeprefix("baguarun: ")
            self._say(f"host {self.name}: {said}")
        elif kind == Kind.RESPONSE:
            self._requests.pop(number).set_result(json.loads(payload))
        elif kind == Kind.REFUSAL:
            self._requests.pop(number).set_exception(RuntimeError(f"host {self.name}: {json.loads(payload)}"))
        elif kind == Kind.EXIT:
            self._processes[number].end(json.loads(payload))
        elif kind == Kind.READY:
            response = fill(Ready, json.loads(payload))
            self.host_hash = response.host_hash
            if response.problem:
                self.error = f"host {self.name} {response.problem}"
            self._ready.set()

    def _lose(self):
        """Called when the connection has ended: so have, as far as we know, all processes."""
        if self.error is None:
            self.error = self._explanation()
        self._ready.set()
        with self._lock:
            processes = list(self._processes.values())
        for process in processes:
            process.end(LOST, self.error)
            process.close()
        self._fail_requests()

    def _fail_requests(self):
        with self._lock:
            requests, self._requests = self._requests, {}
        for future in requests.values():
            future.set_exception(ConnectionError(self.error))

    def _explanation(self):
        lines = [line.strip() for line in self._stderr.decode(errors="replace").splitlines() if line.strip()]
        words = lines[-1] if lines else f"ssh ended with status {self._ssh.exit_code} and said nothing"
        if self._ready.is_set():
            return f"the connection to host {self.name} was lost ({words}); its processes end by themselves"
        if self._ssh.exit_code in (126, 127) or (lines and "ModuleNotFoundError" in words):
            return (f"host {self.name} cannot run {sys.executable} with bagua_hvd ({words}): every host needs Python "
                    "and bagua_hvd where this one has them")
        return (f"host {self.name} cannot be reached ({words}): check that `{self._options.trial(self.name)}` works "
                "without asking for anything")
