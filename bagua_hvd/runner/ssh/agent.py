"""A host's end of a connection: runs processes for the launcher, and stops them when the launcher is gone.

sshd starts it; its input and output carry frames from and to the launcher. When the input ends, or the launcher is
silent for longer than it announced (a lost network), everything is stopped: SIGTERM, then SIGKILL. If the agent itself
is killed, its processes are killed, too: see processes.Guard. Needs only Python's own modules.
"""
import json
import os
import selectors
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from bagua_hvd.core.version import __version__
from bagua_hvd.job import probe
from bagua_hvd.job.channel import fill
from bagua_hvd.job.environment import host_hash
from bagua_hvd.runner.output import Console, Descriptor
from bagua_hvd.runner.spawner import AnyProcess, Task
from bagua_hvd.runner.ssh.frames import MAGIC, Begin, Kind, Reader, Ready, Start, pack
from bagua_hvd.runner.supervisor import Supervisor

_FIRST_SECONDS = 30.0        # until the launcher has announced how long it may be silent
_READ_NBYTES = 1 << 16


class _Stream:
    """Sends output of a process as frames."""

    def __init__(self, output, kind, number):
        self._output, self._kind, self._number = output, kind, number

    def feed(self, data):
        self._output.write(pack(self._kind, self._number, data))

    def close(self):
        self._output.write(pack(self._kind, self._number, b""))


class _LauncherConsole(Console):
    """Sends the supervisor's messages to the launcher."""

    def __init__(self, output):
        super().__init__(output, output)
        self._output = output

    def say(self, text):
        with suppress(BrokenPipeError):
            self._output.write(pack(Kind.SAY, 0, text.encode(errors="surrogateescape")))


class Agent:
    """See the module. source, sink: descriptors of the frames."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        os.set_blocking(source, False)
        self._output = Descriptor(sink)
        self._supervisor = Supervisor(_LauncherConsole(self._output), self._should_stop, report_failures=False,
                                      on_exit=lambda process, code: self._send(Kind.EXIT, process.name, code))
        self._supervisor.selector.register(source, selectors.EVENT_READ, lambda fd: self._handle())
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
                self._supervisor.selector.unregister(self._source)
                return
            self._heard = time.monotonic()
            for frame in self._reader.feed(data):
                if frame[0] == Kind.SIGNAL_ALL:
                    self._on_signal_all(*frame[1:])
                elif frame[0] != Kind.PING:
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
        self._supervisor.spawner.signal_all(signum)
        # Processes that have not started yet would not receive it.
        for frame in [frame for frame in self._frames if frame[0] == Kind.START]:
            self._frames.remove(frame)
            self._send(Kind.EXIT, frame[1], 128 + signum)

    def _on_finish(self, number, payload):
        self._supervisor.finish()

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
