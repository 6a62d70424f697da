"""Starts and stops workers one by one while the job runs, from any thread, for an elastic driver.

The caller's thread forwards output and handles signals, in run(); the driver is a function that run() calls in another
thread.
"""
import threading
from concurrent.futures import Future
from typing import Any

from bagua_hvd.runner.supervisor import GRACE_SECONDS, Supervisor, Task


class JobStopped(RuntimeError):
    """The job is being stopped: no worker is started any more."""


class Worker:
    """A process of the job, on any host.

    Attributes:
        exit_code: None while it runs; 128 + n if signal n ended it. 255 may also mean that its host could not be
            connected or was lost; `note` then says why.
        note: see exit_code; else None.
        error: the OSError because of which it was not started; else None.
    """

    def __init__(self, workers):
        self.exit_code = None
        self.note = self.error = None
        self._workers = workers
        self._process = None
        self._ended = threading.Event()

    def wait(self, timeout=None):
        """The exit code, after all output is forwarded; None if it still runs after `timeout` seconds."""
        return self.exit_code if self._ended.wait(timeout) else None

    def terminate(self, grace_seconds=GRACE_SECONDS):
        """Sends SIGTERM to it and its descendants, and SIGKILL after the grace period. Returns at once."""
        self._workers._call(lambda: self._process and self._workers._supervisor.terminate(self._process, grace_seconds))

    def _end(self, exit_code, note=None):
        self.exit_code, self.note = exit_code, note
        self._workers._unfinished.discard(self)
        self._ended.set()


class Workers:
    """Starts workers.

    Args:
        console: Console.
        spawner: starts them, entered by the caller; None: on this host only.
        survivors_seconds: how long workers may run after main() raised.
    """

    def __init__(self, console, spawner=None, survivors_seconds=0):
        self._console = console
        self._supervisor = Supervisor(console, spawner=spawner, on_exit=self._on_exit)
        self._survivors_seconds = survivors_seconds
        self._lock = threading.Lock()
        self._closed = False
        self._unfinished = set()
        self._workers = {}      # process -> Worker

    def start(self, host, env, command, output, name):
        """Starts a command on a host and returns its Worker, at once. Any thread.

        Args:
            host: as the spawner knows it; None: this one.
            env: the whole environment; on another host, the differences from the connection's base environment.
            output: (stdout, stderr), LineForwarders, used only by run()'s thread.
            name: for messages; the rank.
        Raises:
            JobStopped: run() is about to end.
        """
        worker = Worker(self)
        stdout, stderr = output
        task = Task(name, command, env, stdout, stderr, host)
        with self._lock:
            if self._closed or self._supervisor.stopping:
                raise JobStopped("the job is being stopped")
            self._unfinished.add(worker)
        self._call(lambda: self._start(worker, task))
        return worker

    def call(self, function):
        """Makes run()'s thread call function(); returns a Future of its result. Any thread."""
        future: Future[Any] = Future()

        def call():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._call(call)
        return future

    @property
    def stopping(self):
        """Whether all workers are being stopped, for instance by a signal."""
        return self._supervisor.stopping

    def say(self, text):
        """Prints a line of the launcher itself. Any thread."""
        self._call(lambda: self._console.say(text))

    def run(self, main):
        """Calls main() in a thread and returns (its result, supervisor.Outcome) when no worker is left.

        Workers that still run when main() returns are stopped; when it raises, after survivors_seconds. A signal stops
        the workers (their wait() returns) and then run(); main() should then return, too. Exceptions of main() are
        raised here.
        """
        result: list[tuple[Any, BaseException | None]] = []

        def call():
            seconds = 0
            try:
                result.append((main(), None))
            except BaseException as error:
                result.append((None, error))
                seconds = self._survivors_seconds
            finally:
                self._call(lambda: self._supervisor.stop(seconds))

        thread = threading.Thread(target=call, name="elastic driver", daemon=True)
        self._call(thread.start)
        try:
            outcome = self._supervisor.run([])
        finally:
            with self._lock:
                self._closed = True
            for worker in list(self._unfinished):
                worker._end(137)
        thread.join()
        value, error = result[0]
        if error is not None:
            raise error
        return value, outcome

    def _call(self, function):
        self._supervisor.call_soon(function)

    def _start(self, worker, task):
        if self._supervisor.stopping:
            return      # run() ends it
        try:
            worker._process = self._supervisor.start(task)
        except OSError as error:
            worker.error = error
            worker._end(255, f"cannot be started: {error.strerror}")
        else:
            self._workers[worker._process] = worker

    def _on_exit(self, process, exit_code):
        if exit_code and not self._supervisor.stopping:     # its descendants may not live as long as the job
            self._supervisor.terminate(process)
        self._workers.pop(process)._end(exit_code, process.note)
