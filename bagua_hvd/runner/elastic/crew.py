"""Carries out the driver's decisions: processes, their output under their present ranks, messages."""
import errno
import os
import threading
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from bagua_hvd.job.elastic_worker import DRIVER, WORKER
from bagua_hvd.job.probe import interface_of
from bagua_hvd.job.rendezvous import Rendezvous
from bagua_hvd.job.server import Service, join_address
from bagua_hvd.runner.common.util.hosts import SlotInfo
from bagua_hvd.runner.dashboard import Dashboard
from bagua_hvd.runner.elastic.reach import Reach
from bagua_hvd.runner.job import OutputOptions, is_local, worker_environment
from bagua_hvd.runner.output import Console, LineForwarder
from bagua_hvd.runner.reports import Reports
from bagua_hvd.runner.spawner import AnyProcess
from bagua_hvd.runner.ssh.connection import LOST
from bagua_hvd.runner.supervisor import GRACE_SECONDS, Supervisor, Task

# This process lacks something: the host of the worker that it was to start is not to blame.
_SHORTAGES = errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN


class _RankOutput:
    """One output stream of a worker. Like LineForwarder, but the rank may change.

    The supervisor's loop calls feed() and close(); another thread may set rank.
    """

    def __init__(self, make, rank):
        self._make = make
        self._forwarder_rank = self.rank = rank
        self._forwarder = make(rank)

    def feed(self, data):
        if self.rank != self._forwarder_rank:
            self._forwarder.close()
            self._forwarder_rank = self.rank
            self._forwarder = self._make(self._forwarder_rank)
        self._forwarder.feed(data)

    def close(self):
        self._forwarder.close()


class Crew:
    """The crew of a driver.ElasticDriver.

    Args:
        env: the launcher's environment, including variables set by its flags. supervisor: its on_exit is the crew's.
        secret_key: base64 bytes.
        on_end: function of (number, exit code, note, because_of), see driver.ElasticDriver.ended; called in any thread
            when a process has ended, or could not be started.
    Attributes:
        reports: Reports of the workers, by number.
    """

    def __init__(self, command: list[str], env: dict[str, str], output: OutputOptions, supervisor: Supervisor,
                 reach: Reach, service: Service, rendezvous: Rendezvous, secret_key: bytes, console: Console,
                 on_end: Callable[[int, int | None, Any, int | None], object],
                 dashboard: Dashboard | None = None) -> None:
        self._command = command
        self._env = env
        self._output = output
        self._supervisor = supervisor
        self._reach = reach
        self._service = service
        self._rendezvous = rendezvous
        self._secret_key = secret_key
        self._console = console
        self._on_end = on_end
        self._dashboard = dashboard
        self.reports = Reports(dashboard)
        self._written: set[str] = set()     # paths of output files
        # Changed by the supervisor's loop only.
        self._running: dict[int, tuple[AnyProcess, tuple[_RankOutput, _RankOutput]]] = {}      # by number
        self._stopped: set[int] = set()     # numbers of workers that must not be started any more

    def start(self, number: int, host: str, slot: SlotInfo) -> None:
        """Starts the worker `number` at a SlotInfo, once its host can be reached."""
        finder = threading.Thread(target=self._find, args=(number, host, slot), name="elastic worker", daemon=True)
        try:
            finder.start()
        except RuntimeError as error:       # a limit of threads
            self._not_started(number, OSError(errno.EAGAIN, str(error)))

    def _find(self, number, host, slot):
        try:
            place = self._reach.find(host)
        except Exception as error:      # of any kind: the driver waits until a worker's end is reported
            self._not_started(number, error)
        else:
            self._supervisor.call_soon(lambda: self._begin(number, host, slot, place))

    def _not_started(self, number, error):
        if getattr(error, "errno", None) in _SHORTAGES:
            self._on_end(number, None, error, None)
        else:
            self._on_end(number, LOST, str(error) or type(error).__name__, None)

    def _begin(self, number, host, slot, place):
        if number in self._stopped or self._supervisor.stopping:
            self._on_end(number, LOST, "not started", None)
            return
        env = worker_environment(self._env, slot, place.rendezvous, self._rendezvous.port, self._secret_key,
                                 place.interface)
        env.update({"HOROVOD_ELASTIC": "1", DRIVER: join_address(place.rendezvous, self._service.port),
                    WORKER: str(number)})
        if is_local(host):
            # Several names of this host count as several hosts.
            env.setdefault("BAGUA_HVD_HOST_ID", host)
        else:
            env.setdefault("NCCL_SOCKET_IFNAME", interface_of(place.interface))
        stdout, stderr = (_RankOutput(lambda rank, stream=stream: self._forwarder(number, rank, stream), slot.rank)
                          for stream in ("stdout", "stderr"))
        try:
            process = self._supervisor.start(Task(number, self._command, env, stdout, stderr, host))
        except OSError as error:
            self._not_started(number, error)
        else:
            self._running[number] = process, (stdout, stderr)

    def exited(self, process: AnyProcess, exit_code: int) -> None:
        """For the supervisor: a process has ended."""
        if exit_code and not self._supervisor.stopping:     # its descendants may not live as long as the job
            self._supervisor.terminate(process)
        self._on_end(process.name, exit_code, process.note, self.reports.because_of.get(process.name))

    def _forwarder(self, number, rank, stream):
        file = None
        if self._output.directory is not None:
            path = os.path.join(self._output.directory, f"rank.{rank}", stream)
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                file = open(path, "ab" if path in self._written else "wb")  # a rank may have several processes in turn
                self._written.add(path)
            except OSError as error:
                self.say(f"baguarun: not writing {path}: {error.strerror}")
        forwarder = LineForwarder(self._console, rank, stream, self._output.timestamp, file)
        return self.reports.filter(number, rank, forwarder) if stream == "stderr" else forwarder

    def stop(self, number: int, grace_seconds: float = GRACE_SECONDS) -> None:
        """Sends SIGTERM, and SIGKILL after the grace period."""
        self._supervisor.call_soon(lambda: self._stop(number, grace_seconds))

    def _stop(self, number, grace_seconds):
        self._stopped.add(number)
        if number in self._running:
            self._supervisor.terminate(self._running[number][0], grace_seconds)

    def forget(self, numbers: AbstractSet[int]) -> None:
        """Drops the output of workers whose end the driver has handled: it places and stops them no more."""
        self._supervisor.call_soon(lambda: self._forget(numbers))

    def _forget(self, numbers):
        for number in numbers:
            self._running.pop(number, None)
            self._stopped.discard(number)
        self.reports.forget(numbers)

    def place(self, number: int, slot: SlotInfo) -> None:
        """From now on the worker's output is printed under the SlotInfo's rank."""
        for output in self._running[number][1]:
            output.rank = slot.rank
        if self._dashboard:
            self._dashboard.reset_rank(slot)

    def interface(self, host: str, hosts: Iterable[str]) -> str:
        """The interface by which a worker of `host` connects to those of `hosts`. NoRoute: there is none."""
        return self._reach.interface(host, hosts)

    def send(self, number: int, message: object) -> None:
        self._service.send(number, message)

    def say(self, text: str) -> None:
        """Prints a line of the launcher itself."""
        self._supervisor.call_soon(lambda: self._console.say(text))
