"""Runs an elastic job: combines discovery, driver, connections and processes.

The crew carries out the driver's decisions: processes, their output under their present ranks, messages.
"""
import errno
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.job.elastic_worker import DRIVER, WORKER, WORKER_SAYS
from bagua_hvd.job.probe import interface_of
from bagua_hvd.job.rendezvous import Rendezvous
from bagua_hvd.job.server import EVERY_INTERFACE, Service, join_address
from bagua_hvd.runner.common.util.hosts import SlotInfo, bind_address, is_local, parse_hosts_and_slots
from bagua_hvd.runner.elastic.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript, HostManager, searched
from bagua_hvd.runner.elastic.driver import ElasticDriver
from bagua_hvd.runner.elastic.settings import ElasticSettings
from bagua_hvd.runner.job import Interrupted, Job, worker_environment
from bagua_hvd.runner.spawner import AnyProcess, Task
from bagua_hvd.runner.ssh.connection import LOST
from bagua_hvd.runner.ssh.network import Reach
from bagua_hvd.runner.supervisor import GRACE_SECONDS, Outcome, Supervisor

# Interval at which the driver checks its deadlines when no event occurs.
_STEP_SECONDS = 0.2
# This process lacks something: the host of the worker that it was to start is not to blame.
_SHORTAGES = errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN


def plan_elastic(env: Mapping[str, str], num_proc: int | None = None, min_num_proc: int | None = None,
                 max_num_proc: int | None = None, script: str | None = None, slots: int | None = None,
                 hosts_string: str | None = None,
                 reset_limit: int | None = None) -> tuple[HostDiscovery, ElasticSettings]:
    """(HostDiscovery, ElasticSettings) from a user's arguments.

    Args:
        env: for HOROVOD_ELASTIC_TIMEOUT and HOROVOD_START_TIMEOUT.
        script: path of a discovery script; `slots` applies to hosts that it prints without a number.
        hosts_string: `h1:2,h2:2`, if there is no script.
    Raises:
        ValueError: the numbers contradict each other, or there are too few hosts.
    """
    settings = ElasticSettings(
        num_proc, min_num_proc, max_num_proc, variables.read("HOROVOD_ELASTIC_TIMEOUT", env),
        variables.read("HOROVOD_START_TIMEOUT", env), reset_limit, hosts_are_fixed=script is None)
    if script is not None:
        return HostDiscoveryScript(script, slots), settings
    assert settings.num_proc is not None        # guaranteed by ElasticSettings
    _, hosts = parse_hosts_and_slots(hosts_string or f"localhost:{settings.num_proc}")
    if len(hosts) < 2:
        raise ValueError("an elastic job needs two hosts or a discovery script, because a host is not used again after "
                         "a worker fails there: list hosts with -H, or give --host-discovery-script")
    if sum(hosts.values()) < settings.num_proc:
        raise ValueError(f"Requested more processes ({settings.num_proc}) than there are available slots "
                         f"({sum(hosts.values())}): ask for fewer processes, or give the hosts more slots")
    return FixedHosts(hosts), settings


def listen_address(discovery: HostDiscovery, settings: ElasticSettings) -> str:
    """The address at which the launcher listens: other hosts may join, unless the job's are known from the start."""
    return bind_address(discovery.find_available_hosts_and_slots()) if settings.hosts_are_fixed else EVERY_INTERFACE


def run_elastic(job: Job, discovery: HostDiscovery, settings: ElasticSettings,
                cooldown_range: Sequence[float] | None = None) -> None:
    """Runs the command as the ranks of an elastic job; returns when a worker, and with it the job, has ended with 0.

    Args:
        cooldown_range: see HostManager.
    Raises:
        WorkerFailed: workers failed, and the job could not continue without them. Interrupted: a signal stopped the
            job. RuntimeError: too few slots for too long, too many resets, no state left, or the first discovery
            failed. Its cause is the WorkerFailed of a worker that failed before, if one did.
        OSError: the output directory cannot be written, or no process can be started.
        In all cases no process is left running.
    """
    hosts = HostManager(discovery, cooldown_range)
    # Before there is anything to clean up: a discovery that fails at once is the user's mistake.
    first = discovery.find_available_hosts_and_slots()
    events: queue.SimpleQueue = queue.SimpleQueue()
    address, survivors = listen_address(discovery, settings), job.survivors_seconds
    with job.running(), ExitStack() as stack:
        rendezvous = stack.enter_context(Rendezvous(job.secret, address))
        service = stack.enter_context(Service(job.secret, lambda *event: events.put(event), WORKER_SAYS, address))
        crew: Crew
        supervisor = Supervisor(job.console, spawner=job.spawner, on_exit=lambda *ended: crew.exited(*ended))
        crew = Crew(job, supervisor, Reach(job.spawner, job.options, supervisor.call), service, rendezvous,
                    lambda number, *how: events.put(("ended", number, how)))
        job.spawner.say = lambda text: crew.say(f"baguarun: {text}")
        driver = ElasticDriver(settings, hosts, crew, rendezvous.rank_ended, survivors_seconds=survivors)
        driver.hosts_found(first)
        stack.enter_context(searched(discovery, lambda found: events.put(("hosts", None, found)), crew.say))
        outcome = run_beside(supervisor, lambda: drive(driver, events, lambda: supervisor.stopping), survivors)
        if outcome.signum is not None:
            raise Interrupted(outcome.signum)


def run_beside(supervisor: Supervisor, main: Callable[[], object], survivors_seconds: float = 0) -> Outcome:
    """Calls main() in a thread beside the supervisor's loop; returns the supervisor's Outcome when no process is left.

    Processes that still run when main() returns are stopped; when it raises, after survivors_seconds. A signal stops
    them, too; main() should then return. Exceptions of main() are raised here.
    """
    result: Future[Any] = Future()

    def call():
        seconds = 0.0
        try:
            result.set_result(main())
        except BaseException as error:
            result.set_exception(error)
            seconds = survivors_seconds
        supervisor.call_soon(lambda: supervisor.stop(seconds))

    thread = threading.Thread(target=call, name="elastic driver", daemon=True)
    supervisor.call_soon(thread.start)
    outcome = supervisor.run([])
    thread.join()
    result.result()
    return outcome


def drive(driver: ElasticDriver, events: queue.SimpleQueue[tuple[str, int | None, Any]],
          after_each_turn: Callable[[], object]) -> None:
    """The driver's thread: passes it the events until the job has ended.

    Args:
        events: queue of (event, number of the worker or None, data). after_each_turn: function; true: return at once.
    Raises:
        The exception that the job ends with.
    """
    while not driver.finished and driver.failure is None:
        try:
            driver.step()
            _handle(driver, *events.get(timeout=_STEP_SECONDS))
            while True:
                _handle(driver, *events.get_nowait())
        except queue.Empty:
            pass
        if after_each_turn():
            return
    if driver.failure is not None:
        raise driver.failure


def _handle(driver, event, number, data):
    if event == "hosts":
        driver.hosts_found(data)
    elif event == "join":
        driver.joined(number, data.skip_sync, data.failure, data.silent)
    elif event == "ended":
        driver.ended(number, *data)
    else:
        {"syncing": driver.syncing, "synced": driver.synced, "ping": driver.responded,
         "disconnected": driver.disconnected}[event](number)


class _RankOutput:
    """One output stream of a worker. Like LineForwarder, but the rank may change; any thread may set it."""

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
        supervisor: its on_exit is the crew's.
        on_end: function of (number, exit code, note, because_of), see driver.ElasticDriver.ended; called in any thread
            when a process has ended, or could not be started.
    """

    def __init__(self, job: Job, supervisor: Supervisor, reach: Reach, service: Service, rendezvous: Rendezvous,
                 on_end: Callable[[int, int | None, Any, int | None], object]) -> None:
        self._job = job
        self._supervisor = supervisor
        self._reach = reach
        self._service = service
        self._rendezvous = rendezvous
        self._on_end = on_end
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
        env = worker_environment(self._job.env, slot, place.rendezvous, self._rendezvous.port, self._job.secret_key,
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
            process = self._supervisor.start(Task(number, self._job.command, env, stdout, stderr, host))
        except OSError as error:
            self._not_started(number, error)
        else:
            self._running[number] = process, (stdout, stderr)

    def exited(self, process: AnyProcess, exit_code: int) -> None:
        """For the supervisor: a process has ended."""
        if exit_code and not self._supervisor.stopping:     # its descendants may not live as long as the job
            self._supervisor.terminate(process)
        self._on_end(process.name, exit_code, process.note, self._job.reports.because_of.get(process.name))

    def _forwarder(self, number, rank, stream):
        folder = f"rank.{rank}"
        try:
            return self._job.forwarder(number, rank, stream, folder)
        except OSError as error:
            self.say(f"baguarun: not writing {self._job.directory}/{folder}/{stream}: {error.strerror}")
            return self._job.forwarder(number, rank, stream)

    def stop(self, number: int, grace_seconds: float = GRACE_SECONDS) -> None:
        """Sends SIGTERM, and SIGKILL after the grace period."""
        self._supervisor.call_soon(lambda: self._stop(number, grace_seconds))

    def _stop(self, number, grace_seconds):
        self._stopped.add(number)
        if number in self._running:
            self._supervisor.terminate(self._running[number][0], grace_seconds)

    def place(self, number: int, slot: SlotInfo) -> None:
        """From now on the worker's output is printed under the SlotInfo's rank."""
        for output in self._running[number][1]:
            output.rank = slot.rank
        self._job.show(slot)

    def interface(self, host: str, hosts: Iterable[str]) -> str:
        """The interface by which a worker of `host` connects to those of `hosts`. NoRoute: there is none."""
        return self._reach.interface(host, hosts)

    def send(self, number: int, message: object) -> None:
        self._service.send(number, message)

    def say(self, text: str) -> None:
        """Prints a line of the launcher itself."""
        self._supervisor.call_soon(lambda: self._job.console.say(text))
