"""Runs processes to their end: forwards their output, and stops all of them after the first failure or on a signal.

One loop in one thread, built on selectors. A spawner starts the processes, possibly on other hosts. After a failure the
others have `survivors_seconds` to end by themselves, with errors of their own, and to save their work. A stop sends
SIGTERM to every process and its session, and SIGKILL after GRACE_SECONDS.
However run() ends, even by an exception, no process of the job is left. Background processes of ranks end with the job,
including daemons, unless they have dropped the variable processes.MARK.
"""
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bagua_hvd.runner.output import Console, Sink
from bagua_hvd.runner.spawner import GRACE_SECONDS, AnyProcess, Spawner, Task

_Result = TypeVar("_Result")

# How long a pipe is read after its process ended: a child that outlives it may hold the pipe open forever.
_DRAIN_SECONDS = 0.5
# A process that survives SIGKILL for this long is stuck in the kernel (a dead file server, a driver).
_STUCK_SECONDS = 5
# Two signals within this time count as one: a terminal and a parent may both pass on the same Ctrl-C.
_SAME_SIGNAL_SECONDS = 0.3
_POLL_SECONDS = 0.05
_READ_NBYTES = 1 << 16


@dataclass
class Outcome:
    """How the processes ended."""

    exit_codes: dict[Any, int] = field(default_factory=dict)      # by name; 128 + n for signal n
    failures: list[Any] = field(default_factory=list)   # names of those that failed before anything was stopped, in
                                # the order of their ends
    failed: Any = None       # name of the one that caused the failure; None: none failed before a stop from outside
    signum: int | None = None   # the signal that stopped the launcher; SIGPIPE: nobody reads its output any more


@dataclass
class _Running:
    process: AnyProcess
    forwarders: dict[int, Sink]         # by descriptor, while it is open
    pidfd: int | None
    drain_until: float | None = None    # set: the loop has handled the end, even if the exit code was read before
    kill_at: float | None = None    # set: this process and its descendants are being terminated

    @property
    def ended(self):
        return self.drain_until is not None

    @property
    def done(self):
        return self.ended and not self.forwarders and self.kill_at is None


class Supervisor:
    """Supervises one set of processes, once.

    Args:
        console: Console, for messages about the first failure.
        should_stop: called about twenty times a second; True stops everything. None: never.
        handle_signals: SIGINT, SIGTERM and SIGHUP stop everything, unless they were ignored before (nohup), and a
            second one kills at once. SIGUSR1 and SIGUSR2, which Slurm sends before a time limit, go to the processes
            without their descendants, unless the program handles them. Only in the main thread; in others, and with
            False, signals are left alone.
        report_failures: whether the first failure is reported on the console's stderr.
        spawner: starts the processes, entered by the caller; None: on this host.
        on_exit: called in the loop with (process, exit code) when a process has ended and its output is forwarded,
            instead of stopping all at the first failure; run() then continues without processes, until finish().
            None: all are stopped, and run() ends with the last of them.
        survivors_seconds: how long the others may run after a failure. 0: they are stopped at once.
        on_end: called in the loop with (name, exit code) when a process has ended; or None.
        find_cause: function of Outcome.failures that returns the one that caused the others; None: the first.
    Attributes:
        spawner: see Args. selector: of the loop, which calls its keys' data with their descriptor. Only for the loop.
    """

    def __init__(self, console: Console, should_stop: Callable[[], bool] | None = None, handle_signals: bool = True,
                 report_failures: bool = True, spawner: Spawner | None = None,
                 on_exit: Callable[[AnyProcess, int], object] | None = None, survivors_seconds: float = 0,
                 find_cause: Callable[[list[Any]], Any] | None = None,
                 on_end: Callable[[Any, int], object] | None = None) -> None:
        self._console = console
        self.spawner = spawner or Spawner()
        self._owns_spawner = spawner is None
        self._on_exit = on_exit
        self._on_end = on_end
        self._open = on_exit is not None
        self._calls: deque[Callable[[], object]] = deque()
        self._wakeup: socket.socket | None = None
        self._report_failures = report_failures
        self._should_stop = should_stop
        self._handle_signals = handle_signals and threading.current_thread() is threading.main_thread()
        self.selector = selectors.DefaultSelector()
        self._running: list[_Running] = []
        # Ended processes. They are reaped at the end only, because their descendants still use their session's number.
        self._ended: list[_Running] = []
        self._signals: list[tuple[int, float]] = []      # (number, when)
        self._survivors_seconds = survivors_seconds
        self._find_cause = find_cause or (lambda failures: failures[0])
        self._stop_at: float | None = None      # set: one has failed, and the others may run until then
        self._kill_at: float | None = None      # set: a stop is in progress
        self._killed_at: float | None = None
        self._outcome = Outcome()

    def run(self, tasks: Iterable[Task]) -> Outcome:
        """Starts all tasks, waits for all of them, and returns the Outcome.

        Raises:
            OSError: a process could not be started. The processes started before are stopped.
        """
        with ExitStack() as stack:
            stack.callback(self.selector.close)
            if self._owns_spawner:
                stack.enter_context(self.spawner)
            wakeup = self._open_wakeup(stack)
            stack.enter_context(self._signals_handled(wakeup))
            stack.callback(self._clean_up)
            self._console.while_blocked(self._check_time)
            for task in tasks:
                if not self._signals:
                    self.start(task)
            while not self._finished():
                for key, _ in self.selector.select(self._select_timeout()):
                    key.data(key.fd)
                while self._calls:
                    self._calls.popleft()()
                self._check_processes()
                stopping = self._kill_at is not None
                self._check_time()
                if self._outcome.signum is not None and not stopping and self._report_failures:
                    name = signal.Signals(self._outcome.signum).name
                    self._console.say(f"baguarun: {name}: stopping the job, which may take {GRACE_SECONDS} s; "
                                      "the signal once more kills it at once.")
        if self._outcome.failures:
            self._outcome.failed = self._find_cause(self._outcome.failures)
        return self._outcome

    # ---- while it runs ------------------------------------------------------------------------------------------

    def call_soon(self, function: Callable[[], object]) -> None:
        """Makes the loop call function(). Any thread; ignored when run() has ended."""
        self._calls.append(function)
        if self._wakeup is not None:
            with suppress(OSError):     # full: the loop will wake up; closed: run() has ended
                self._wakeup.send(b"\0")

    def call(self, function: Callable[[], _Result]) -> Future[_Result]:
        """call_soon(); returns a Future of the function's result."""
        future: Future[_Result] = Future()

        def call():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.call_soon(call)
        return future

    def start(self, task: Task) -> AnyProcess:
        """Starts a task and returns its process. Only in the loop. OSError: it could not be started."""
        process = self.spawner.start(task)
        forwarders = {process.stdout: task.stdout, process.stderr: task.stderr}
        running = _Running(process, forwarders, process.open_pidfd())
        self._running.append(running)
        for fd in forwarders:
            self.selector.register(fd, selectors.EVENT_READ, lambda fd, running=running: self._read(running, fd))
        if running.pidfd is not None:
            self.selector.register(running.pidfd, selectors.EVENT_READ,
                                    lambda fd, running=running: self._check_process(running))
        return process

    def terminate(self, process: AnyProcess, grace_seconds: float = GRACE_SECONDS) -> None:
        """SIGTERM for one process and its descendants, SIGKILL later, even after its own end. Only in the loop."""
        for running in [*self._running, *self._ended]:
            if running.process is process and running.kill_at is None:
                running.kill_at = time.monotonic() + grace_seconds
                process.signal(signal.SIGTERM)
                if running in self._ended:
                    self._ended.remove(running)
                    self._running.append(running)

    def finish(self) -> None:
        """With on_exit: makes run() return when no process runs any more. Only in the loop."""
        self._open = False

    def stop(self, after_seconds: float = 0) -> None:
        """Stops everything, like should_stop, that has not ended by itself after that time. Only in the loop."""
        if not self.stopping:
            self._open = False
            self._stop_after(after_seconds)

    @property
    def stopping(self) -> bool:
        """Whether a stop is in progress or scheduled, for whatever reason."""
        return self._kill_at is not None or self._stop_at is not None

    def _open_wakeup(self, stack):
        """A socket that wakes the selector when any thread or signal handler writes to it."""
        receiver, sender = socket.socketpair()
        self._wakeup = sender
        for end in (receiver, sender):
            stack.callback(end.close)
            end.setblocking(False)
        self.selector.register(receiver, selectors.EVENT_READ, lambda fd: receiver.recv(_READ_NBYTES))
        self.call_soon(lambda: None)    # for calls made before the socket existed
        return sender

    @contextmanager
    def _signals_handled(self, wakeup):
        if not self._handle_signals:
            yield
            return
        before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        previous = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                    if signal.getsignal(n) not in (signal.SIG_IGN, None)}   # None: Python cannot restore it
        previous |= {n: signal.signal(n, lambda signum, frame: self.call_soon(lambda: self._pass_on(signum)))
                     for n in (signal.SIGUSR1, signal.SIGUSR2) if signal.getsignal(n) == signal.SIG_DFL}
        # If it were inherited as ignored, the kernel would discard exit codes.
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield
        finally:
            for n, handler in previous.items():
                signal.signal(n, handler)
            signal.set_wakeup_fd(before)

    def _pass_on(self, signum):
        for running in self._running:
            running.process.signal(signum)

    def _on_signal(self, signum, frame):
        now = time.monotonic()
        if self._signals and now - self._signals[-1][1] < _SAME_SIGNAL_SECONDS:
            return
        self._signals.append((signum, now))
        if len(self._signals) > 1 and signum != signal.SIGHUP:
            # At once: the loop may be waiting for a suspended terminal.
            self._kill()

    # ---- the loop -----------------------------------------------------------------------------------------------

    def _finished(self):
        stuck = self._killed_at is not None and time.monotonic() > self._killed_at + _STUCK_SECONDS
        if stuck or not any(r.forwarders or not r.ended for r in self._running):
            return stuck or self._kill_at is not None or not (self._open or self._calls)
        return False

    def _select_timeout(self):
        deadlines = [r.drain_until for r in self._running if r.forwarders and r.drain_until is not None]
        deadlines += [at for at in (self._stop_at, self._kill_at) if at is not None]
        if self._killed_at is not None:
            deadlines.append(self._killed_at + _STUCK_SECONDS)
        deadlines += [r.kill_at for r in self._running if r.kill_at is not None]
        now = time.monotonic()
        waits = [max(0, deadline - now) for deadline in deadlines]
        if self._should_stop or any(r.pidfd is None and not r.ended for r in self._running):
            waits.append(_POLL_SECONDS)
        return min(waits, default=None)

    def _read(self, running, fd):
        """Forwards available output, at most one read's size, so that one rank cannot starve the others."""
        if fd not in running.forwarders:
            return False        # closed earlier in this iteration
        try:
            data = os.read(fd, _READ_NBYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close(running, fd)
            return False
        self._forward(running.forwarders[fd].feed, data)
        return True

    def _drain(self, running, until):
        for fd in list(running.forwarders):
            while self._read(running, fd) and time.monotonic() < until:
                pass

    def _forward(self, forward, *args):
        try:
            forward(*args)
        except BrokenPipeError:
            if self._kill_at is None:
                self._outcome.signum = signal.SIGPIPE
                self._stop()

    def _close(self, running, fd):
        self.selector.unregister(fd)
        os.close(fd)
        self._forward(running.forwarders.pop(fd).close)

    def _check_processes(self):
        """Checks processes without a pidfd, and pipes that are held open after the end."""
        for running in self._running:
            if running.pidfd is None and not running.ended:
                self._check_process(running)
            if running.kill_at is not None and time.monotonic() >= running.kill_at:
                running.kill_at = None
                running.process.signal(signal.SIGKILL)
            if running.drain_until is not None and time.monotonic() >= running.drain_until:
                self._drain(running, running.drain_until + _DRAIN_SECONDS)
                for fd in list(running.forwarders):
                    self._close(running, fd)
        if ended := [running for running in self._running if running.done]:
            self._ended += ended
            self._running = [running for running in self._running if not running.done]

    def _check_process(self, running):
        code = running.process.poll()
        if code is None:
            return
        if running.pidfd is not None:
            self.selector.unregister(running.pidfd)
            os.close(running.pidfd)
            running.pidfd = None
        running.drain_until = time.monotonic() + _DRAIN_SECONDS
        name = running.process.name
        self._outcome.exit_codes[name] = code
        if self._on_end is not None:
            self._on_end(name, code)
        if self._on_exit is None and not (code and self._kill_at is None):
            return
        # Its last output must precede the message about it.
        self._drain(running, running.drain_until)
        if self._on_exit is not None:
            self._on_exit(running.process, code)
        else:
            self._take_failure(running.process, code)

    def _take_failure(self, process, code):
        self._outcome.failures.append(process.name)
        if self._report_failures:
            if process.note:
                self._console.say(f"baguarun: {process.note}")
            self._console.say(f"Process {process.name} exit with status code {code}.")
        if self._stop_at is None:
            self._stop_after(self._survivors_seconds)

    def _stop_after(self, seconds):
        self._stop_at = time.monotonic() + seconds
        if seconds and self._report_failures and self._any_runs():
            self._console.say(f"baguarun: the remaining workers have {seconds:g} s to end by themselves.")

    def _any_runs(self):
        return not all(running.ended for running in self._running)

    def _stop_survivors(self):
        if self._outcome.failures and self._report_failures and self._any_runs():
            cause = self._find_cause(self._outcome.failures)
            self._console.say(f"Terminating remaining workers after failure of Process {cause}.")
        self._stop()

    def _check_time(self):
        """Handles signals and deadlines. Also called while the console blocks; True then means: stop waiting."""
        if self._kill_at is None:
            if self._signals:
                if not self._outcome.failures:      # else the failure ended the job
                    self._outcome.signum = self._signals[0][0]
                self._stop()
            elif self._stop_at is not None and time.monotonic() >= self._stop_at:
                self._stop_survivors()
            elif self._should_stop and self._should_stop():
                self._stop()
        elif self._killed_at is None and time.monotonic() >= self._kill_at:
            self._kill()
        return self._killed_at is not None

    # ---- stopping -----------------------------------------------------------------------------------------------

    def _stop(self):
        self._stop_at = None
        kill_at = self._kill_at = time.monotonic() + GRACE_SECONDS
        self.spawner.signal_all(signal.SIGTERM)
        return kill_at

    def _kill(self):
        self._killed_at = time.monotonic()
        self.spawner.signal_all(signal.SIGKILL)

    def _clean_up(self):
        """Ends processes that are left, in the background or because of an exception, and reaps."""
        if self.spawner.any_left():
            kill_at = self._stop() if self._kill_at is None else self._kill_at
            while self.spawner.any_left() and self._killed_at is None and time.monotonic() < kill_at:
                time.sleep(_POLL_SECONDS)
        self.spawner.kill_all()
        for running in [*self._running, *self._ended]:
            for fd in list(running.forwarders):
                self._close(running, fd)
            if running.pidfd is not None:
                os.close(running.pidfd)
            if running.process.poll() is None:
                self._console.say(f"baguarun: Process {running.process.name} ({running.process.place}) does not end "
                                  "after SIGKILL: it is stuck in the kernel; baguarun ends without it.")
            else:
                running.process.release()
        self._console.close()
