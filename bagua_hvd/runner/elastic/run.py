"""Runs an elastic job: combines discovery, driver, connections and processes."""
import base64
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from bagua_hvd.core import variables
from bagua_hvd.job import reporting
from bagua_hvd.job.channel import make_secret_key
from bagua_hvd.job.elastic_worker import WORKER_SAYS
from bagua_hvd.job.rendezvous import Rendezvous
from bagua_hvd.job.server import EVERY_INTERFACE, Service
from bagua_hvd.runner.common.util.hosts import parse_hosts_and_slots
from bagua_hvd.runner.dashboard import Dashboard
from bagua_hvd.runner.elastic.crew import Crew
from bagua_hvd.runner.elastic.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript, HostManager
from bagua_hvd.runner.elastic.driver import ElasticDriver
from bagua_hvd.runner.elastic.reach import Reach
from bagua_hvd.runner.elastic.settings import ElasticSettings
from bagua_hvd.runner.job import Interrupted, OutputOptions, WorkerFailed, bind_address
from bagua_hvd.runner.output import Console, Descriptor
from bagua_hvd.runner.spawner import Spawner
from bagua_hvd.runner.ssh.connection import HostOptions
from bagua_hvd.runner.ssh.spawner import SshSpawner
from bagua_hvd.runner.supervisor import Outcome, Supervisor

if TYPE_CHECKING:
    from bagua_hvd.runner.function_server import FunctionServer

_DISCOVERY_SECONDS = 1
_GIVE_UP_SECONDS = 1
# Interval at which the driver checks its deadlines when no event occurs.
_STEP_SECONDS = 0.2


class Search:
    """Queries a HostDiscovery every second, in a thread of its own; a context manager.

    Args:
        on_found: function of {name: slots}. say: prints a line.
    """

    def __init__(self, discovery: HostDiscovery, on_found: Callable[[dict[str, int]], object],
                 say: Callable[[str], object]) -> None:
        self._discovery = discovery
        self._on_found = on_found
        self._say = say
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic discovery", daemon=True)

    def _run(self):
        said = None
        while not self._ended.wait(_DISCOVERY_SECONDS):
            try:
                found = self._discovery.find_available_hosts_and_slots()
            except Exception as error:
                if not self._ended.is_set() and str(error) != said:
                    self._say(f"baguarun: keeping the current hosts: {error}")
                    said = str(error)
            else:
                said = None
                self._on_found(found)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._ended.set()
        for _ in range(2):
            self._discovery.close()
            self._thread.join(_GIVE_UP_SECONDS)     # a user's own discovery may hang, and have no close()
            if not self._thread.is_alive():
                return      # else a last search has begun after the first close()


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


def run_elastic(command: list[str], discovery: HostDiscovery, settings: ElasticSettings, env: dict[str, str],
                output: OutputOptions, options: HostOptions, cooldown_range: Sequence[float] | None = None,
                console: Console | None = None, server: "FunctionServer | None" = None,
                dashboard: bool = False) -> None:
    """Runs the command as the ranks of an elastic job; returns when a worker, and with it the job, has ended with 0.

    Args:
        command, env, console, server, dashboard: as in run_static. cooldown_range: see HostManager.
    Raises:
        WorkerFailed: workers failed, and the job could not continue without them. Interrupted: a signal stopped the
            job. RuntimeError: too few slots for too long, too many resets, no state left, or the first discovery
            failed. Its cause is the WorkerFailed of a worker that failed before, if one did.
        ValueError: a variable in `env` is malformed.
        OSError: the output directory cannot be written, or no process can be started.
        In all cases no process is left running.
    """
    console = console or Console(Descriptor(1), Descriptor(2))
    survivors = variables.read("BAGUA_HVD_GRACE_SECONDS", env)
    hosts = HostManager(discovery, cooldown_range)
    # Before there is anything to clean up: a discovery that fails at once is the user's mistake.
    first = discovery.find_available_hosts_and_slots()
    secret_key = server.secret_key if server else make_secret_key()
    secret = base64.b64decode(secret_key)
    events: queue.SimpleQueue = queue.SimpleQueue()
    address = listen_address(discovery, settings)
    with ExitStack() as stack:
        table = stack.enter_context(Dashboard()) if dashboard else None
        if table:
            console = table.console
            env = {**env, reporting.VARIABLE: "1"}
        ssh = SshSpawner(options, env)
        spawner = stack.enter_context(Spawner(ssh))
        rendezvous = stack.enter_context(Rendezvous(secret, address))
        service = stack.enter_context(Service(secret, lambda *event: events.put(event), WORKER_SAYS, address))
        crew: Crew
        supervisor = Supervisor(console, spawner=spawner, on_exit=lambda *ended: crew.exited(*ended))
        reach = Reach(ssh, options, supervisor.call)
        crew = Crew(command, env, output, supervisor, reach, service, rendezvous, secret_key, console,
                    lambda number, *how: events.put(("ended", number, how)), table)
        ssh.say = lambda text: crew.say(f"baguarun: {text}")
        driver = ElasticDriver(settings, hosts, crew, rendezvous.rank_ended, survivors_seconds=survivors)
        driver.hosts_found(first)
        stack.enter_context(Search(discovery, lambda found: events.put(("hosts", None, found)), crew.say))
        try:
            outcome = run_beside(supervisor, lambda: drive(driver, events, lambda: supervisor.stopping), survivors)
        except RuntimeError as error:
            failed = error if isinstance(error, WorkerFailed) else error.__cause__
            if isinstance(failed, WorkerFailed) and not server:
                crew.reports.repeat_traceback(console, failed)
            raise
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
