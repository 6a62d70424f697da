"""A host's end of a connection: runs processes for the launcher, and stops them when the launcher is gone.

sshd starts it; its input and output carry frames from and to the launcher: kind, number, length and payload. When the
input ends, or the launcher is silent for longer than it announced (a lost network), everything is stopped: SIGTERM,
then SIGKILL. If the agent itself is killed, its processes are killed, too: see processes.Guard. Needs only Python's own
modules.

The host's first bytes are MAGIC; output of a login shell before them is skipped. JSON payloads may hold text with
undecodable bytes (surrogates), as environments do.
"""
import enum
import json
import os
import struct
import sys
import threading
import time
from dataclasses import dataclass, is_dataclass
from typing import Any, NoReturn

from bagua_hvd.core.version import __version__
from bagua_hvd.job import probe
from bagua_hvd.job.channel import fill
from bagua_hvd.job.environment import host_hash
from bagua_hvd.runner.output import Console, Descriptor
from bagua_hvd.runner.spawner import AnyProcess, Task
from bagua_hvd.runner.supervisor import Supervisor

MAGIC = b"\0bagua_hvd agent 1\n"
_HEAD = struct.Struct("!BII")
_PAYLOAD_MAX_NBYTES = 1 << 30
_FIRST_SECONDS = 30.0        # until the launcher has announced how long it may be silent
_READ_NBYTES = 1 << 16


class Kind(enum.IntEnum):
    """Sender, meaning of the number, and payload of each kind."""

    BEGIN = 1           # launcher; Begin
    START = 2           # launcher, process; Start
    SIGNAL = 3          # launcher, process; signal number
    SIGNAL_ALL = 4      # launcher; signal number
    FINISH = 5          # launcher: end when no process runs any more; stop background processes
    PING = 6            # launcher: it lives
    REQUEST = 7         # launcher, request; [function's name, arguments]
    READY = 32          # agent, the response to BEGIN; Ready
    STDOUT = 33         # agent, process; bytes, none: closed
    STDERR = 34         # agent, process; as STDOUT
    EXIT = 35           # agent, process; exit code
    SAY = 36            # agent; bytes for the launcher's stderr
    RESPONSE = 37       # agent, request; result of the function
    REFUSAL = 38        # agent, request; why there is no result


@dataclass(frozen=True)
class Begin:
    """The payload of BEGIN: the launcher's version and working directory.

    silence_seconds: after this time of silence the launcher is given up.
    """

    version: str
    folder: str
    silence_seconds: float


@dataclass(frozen=True)
class Start:
    """The payload of START. environment: in addition to the host's own."""

    command: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Ready:
    """The payload of READY. problem: why this host cannot start processes; None: it can. host_hash: of the machine."""

    problem: str | None
    host_hash: str


def pack(kind: Kind, number: int = 0, payload: Any = None) -> bytes:
    """The bytes of a frame. payload: bytes, one of the dataclasses above, or a JSON-serializable value."""
    if not isinstance(payload, bytes):
        payload = json.dumps(vars(payload) if is_dataclass(payload) else payload).encode()
    return _HEAD.pack(kind, number, len(payload)) + payload


class Reader:
    """Splits received bytes into frames.

    Args:
        after_magic: whether to skip everything up to MAGIC.
    """

    def __init__(self, after_magic: bool = False) -> None:
        self._buffer = bytearray()
        self._skipping = after_magic

    def feed(self, data: bytes) -> list[tuple[Kind, int, bytes]]:
        """The frames that are now complete: (kind, number, payload as bytes). ValueError: not frames."""
        self._buffer += data
        if self._skipping:
            at = self._buffer.find(MAGIC)
            if at < 0:
                del self._buffer[:-len(MAGIC)]
                return []
            del self._buffer[:at + len(MAGIC)]
            self._skipping = False
        frames, start = [], 0
        while len(self._buffer) - start >= _HEAD.size:
            kind, number, nbytes = _HEAD.unpack_from(self._buffer, start)
            if nbytes > _PAYLOAD_MAX_NBYTES:
                raise ValueError(f"a frame of {nbytes} bytes")
            end = start + _HEAD.size + nbytes
            if len(self._buffer) < end:
                break
            frames.append((Kind(kind), number, bytes(self._buffer[start + _HEAD.size:end])))
            start = end
        del self._buffer[:start]
        return frames


class _Stream:
    """Sends output of a process as frames."""

    def __init__(self, output, kind, number):
        self._output, self._kind, self._number = output, kind, number

    def feed(self, data):
        self._output.write(pack(self._kind, self._number, data))

    def close(self):
        self._output.write(pack(self._kind, self._number, b""))


class _LauncherStderr:
    """A sink for Console that sends the supervisor's messages to the launcher."""

    is_terminal = False

    def __init__(self, output):
        self._output = output

    def _set_while_blocked(self, function):
        self._output.while_blocked = function

    while_blocked = property(fset=_set_while_blocked)

    def write(self, data):
        self._output.write(pack(Kind.SAY, 0, data))


class Agent:
    """See the module.

    Args:
        source, sink: descriptors of the frames.
    """

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        os.set_blocking(source, False)
        self._output = Descriptor(sink)
        launcher_stderr = _LauncherStderr(self._output)
        self._supervisor = Supervisor(Console(launcher_stderr, launcher_stderr), self._should_stop,
                                      report_failures=False, on_exit=self._on_exit)
        self._supervisor.watch(source, lambda fd: self._handle())
        self._reader = Reader()
        self._frames: list[tuple[Kind, int, bytes]] = []
        self._heard = time.monotonic()
        self._silence_seconds = _FIRST_SECONDS
        self._ended = False
        self._processes: dict[int, AnyProcess] = {}        # by number, ended or not: signals also go to its descendants
        self._requests = probe.Requests()

    def run(self) -> None:
        """Returns once the launcher has sent FINISH or is gone, and nothing runs any more."""
        try:
            self._output.write(MAGIC)
            self._supervisor.run([])
        finally:
            self._requests.close()

    # ---- incoming frames ----------------------------------------------------------------------------------------

    def _pump(self):
        """Reads available input. Signals take effect here, since the loop may wait for the launcher to read."""
        while not self._ended:
            try:
                data = os.read(self._source, _READ_NBYTES)
            except BlockingIOError:
                return
            if not data:
                self._ended = True
                self._supervisor.unwatch(self._source)
                return
            self._heard = time.monotonic()
            for frame in self._reader.feed(data):
                if frame[0] == Kind.SIGNAL_ALL:
                    self._on_signal_all(*frame[1:])
                else:
                    self._frames.append(frame)

    def _should_stop(self):
        self._pump()
        if not self._ended and time.monotonic() > self._heard + self._silence_seconds:
            self._ended = True
            # The launcher reads this when the network is back.
            self._send(Kind.SAY, 0, f"nothing came from the launcher for {self._silence_seconds:g} s, so its ranks are "
                       "stopped: the network was cut, or baguarun was suspended. The limit follows from "
                       "BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS and HOROVOD_GLOO_TIMEOUT_SECONDS".encode())
        return self._ended

    def _handle(self):
        self._pump()
        while self._frames:
            kind, number, payload = self._frames.pop(0)
            getattr(self, f"_on_{kind.name.lower()}")(number, json.loads(payload))

    def _send(self, kind, number=0, payload=None):
        try:
            self._output.write(pack(kind, number, payload))
        except BrokenPipeError:
            self._supervisor.stop()

    def _on_begin(self, number, payload):
        if payload.get("version") != __version__:
            where = os.path.dirname(os.path.dirname(__file__))
            self._send(Kind.READY, 0, Ready(
                f"has bagua_hvd {__version__} in {where}, the launcher {payload.get('version')}: install the same on "
                "every host", host_hash()))
            return
        begin, problem = fill(Begin, payload), None
        self._silence_seconds = begin.silence_seconds
        try:
            os.chdir(begin.folder)
        except OSError as error:
            problem = (f"has no folder {begin.folder} ({error.strerror}): start baguarun in a folder that every "
                       "host has")
        os.environ["PWD"] = begin.folder
        self._send(Kind.READY, 0, Ready(problem, host_hash()))

    def _on_start(self, number, payload):
        start = fill(Start, payload)
        stdout, stderr = (_Stream(self._output, kind, number) for kind in (Kind.STDOUT, Kind.STDERR))
        try:
            process = self._supervisor.start(Task(number, start.command, {**os.environ, **start.environment}, stdout,
                                                  stderr))
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            self._send(Kind.STDERR, number, f"baguarun: cannot be started: {error.strerror}{where}\n".encode())
            self._send(Kind.EXIT, number, 255)
        else:
            self._processes[number] = process

    def _on_signal(self, number, signum):
        process = self._processes.get(number)
        if process is not None:
            process.signal(signum)

    def _on_signal_all(self, number, payload):
        signum = json.loads(payload)
        self._supervisor.signal_all(signum)
        # Processes that have not started yet would not receive it.
        for frame in [frame for frame in self._frames if frame[0] == Kind.START]:
            self._frames.remove(frame)
            self._send(Kind.EXIT, frame[1], 128 + signum)

    def _on_finish(self, number, payload):
        self._supervisor.finish()

    def _on_ping(self, number, payload):
        pass

    def _on_exit(self, process, exit_code):
        self._send(Kind.EXIT, process.name, exit_code)

    # ---- requests -----------------------------------------------------------------------------------------------

    def _on_request(self, number, payload):
        name, arguments = payload
        def work():
            try:
                kind, response = Kind.RESPONSE, getattr(self._requests, name)(**arguments)
            except Exception as error:
                kind, response = Kind.REFUSAL, f"{name}: {str(error) or type(error).__name__}"
            self._supervisor.call_soon(lambda: self._send(kind, number, response))

        threading.Thread(target=work, name=name, daemon=True).start()


def main() -> NoReturn:
    """Serves the launcher connected to standard input and output. Does not return."""
    sink = os.dup(1)
    os.dup2(2, 1)       # printed text must not mix with the frames
    Agent(0, sink).run()
    sys.exit(0)
