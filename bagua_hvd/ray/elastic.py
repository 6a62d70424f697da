"""Elastic jobs on Ray: nodes come and go, actors die, the job continues, by the rules of runner/elastic/driver.py."""
import base64
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bagua_hvd.job.channel import make_secret_key
from bagua_hvd.job.elastic_worker import DRIVER, WORKER, WORKER_SAYS
from bagua_hvd.job.probe import interface_names
from bagua_hvd.job.rendezvous import Rendezvous
from bagua_hvd.job.server import EVERY_INTERFACE, Service, join_address
from bagua_hvd.ray.utils import nics_to_env_var
from bagua_hvd.ray.worker import BECAUSE_OF, BaseHorovodWorker, Messages, Resources
from bagua_hvd.runner.elastic.discovery import HostDiscovery, HostManager, searched
from bagua_hvd.runner.elastic.driver import ElasticDriver
from bagua_hvd.runner.elastic.run import drive
from bagua_hvd.runner.elastic.settings import ElasticSettings
from bagua_hvd.runner.job import worker_environment

_KILLED, _FAILED = 137, 1
# Otherwise Ray would show each rank only its own GPUs, but local ranks change.
_ALL_GPUS = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}


def _nodes():
    """{name: entry of ray.nodes()} of the living nodes, named by address, or by id if several share the address."""
    living = [node for node in ray.nodes() if node["Alive"]]
    addresses = [node["NodeManagerAddress"] for node in living]
    return {node["NodeManagerAddress" if addresses.count(node["NodeManagerAddress"]) == 1 else "NodeID"]: node
            for node in living}


class RayHostDiscovery(HostDiscovery):
    """The nodes of the cluster, with the number of slots that their total resources allow.

    Args:
        use_gpu: whether a slot needs GPUs. cpus_per_slot, gpus_per_slot: resources of a slot.
    Raises:
        ValueError: a slot needs no resources.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: float | None = 1) -> None:
        bundle = Resources(cpus_per_slot, use_gpu, gpus_per_slot if use_gpu else None).bundle()
        self._needed = {kind: count for kind, count in bundle.items() if count}
        if not self._needed:
            raise ValueError("cpus_per_slot=0 without use_gpu: a slot must need CPUs or GPUs; give 1 or more")

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """{node: slots}; nodes are named by address, or by Ray's id if several share the address."""
        found = {name: min(int(node["Resources"].get(kind, 0) // count) for kind, count in self._needed.items())
                 for name, node in _nodes().items()}
        return {name: slots for name, slots in found.items() if slots}


@dataclass
class ElasticParameters(ElasticSettings):
    """ElasticSettings, and settings that only Ray needs.

    Args:
        nics: names of the allowed interfaces; None: those towards the driver.
        discovery: HostDiscovery, for an executor with override_discovery=False.
        cooldown_range: (low, high) seconds after which a node with a failed rank is used again; None: never.
    """

    nics: Any = None
    discovery: HostDiscovery | None = None
    cooldown_range: tuple[int, int] | None = None


class ElasticRayExecutor:
    """A job of Ray actors as ranks, which come and go with the nodes of the cluster.

    A node where a rank failed is not used any more, or only after a cooldown; its ranks end. The others continue, as
    long as there are at least min_num_proc.

    Args:
        settings: from create_settings(); None: its defaults. use_gpu, cpus_per_slot, gpus_per_slot: resources of a
            rank. env_vars: environment variables of the ranks.
        override_discovery: False: the nodes come from settings.discovery; else from Ray.
    Raises:
        ValueError: gpus_per_slot without use_gpu, or no discovery.
    """

    def __init__(self, settings: Any, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int | None = None,
                 env_vars: dict[str, str] | None = None, override_discovery: bool = True) -> None:
        self._settings = settings = settings or self.create_settings()
        self._resources = Resources(cpus_per_slot, use_gpu, gpus_per_slot)
        self.env_vars = env_vars or {}
        self.executable: tuple[Any, Any, Any] = None, None, None
        self._discovery = settings.discovery
        if override_discovery:
            self._discovery = RayHostDiscovery(use_gpu, cpus_per_slot, self._resources.gpu_count)
        if self._discovery is None:
            raise ValueError("override_discovery=False: give create_settings(discovery=...) a HostDiscovery")
        self._started = False

    @classmethod
    def create_settings(cls, min_num_proc: int = 1, max_num_proc: int | None = None, reset_limit: int | None = None,
                        elastic_timeout: int = 600, timeout_s: int = 30, ssh_identity_file: str | None = None,
                        nics: Any = None, min_np: int | None = None, max_np: int | None = None,
                        **kwargs: Any) -> ElasticParameters:
        """The settings for the constructor.

        Args:
            min_num_proc, max_num_proc: ranks (min_np, max_np: their old names). reset_limit: maximum number of
                rendezvous after the first one. elastic_timeout: seconds to wait for enough slots.
            timeout_s: seconds that the first rendezvous waits for ranks that are starting.
            kwargs: num_proc, cooldown_range, discovery: see ElasticSettings and ElasticParameters.
            ssh_identity_file: no effect; Ray starts the ranks.
        Raises:
            ValueError: the numbers contradict each other.
        """
        return ElasticParameters(
            min_num_proc=min_np or min_num_proc, max_num_proc=max_np or max_num_proc, reset_limit=reset_limit,
            elastic_timeout=elastic_timeout, start_timeout=timeout_s, nics=nics, **kwargs)

    def start(self) -> None:
        """Connects to Ray if needed; run() starts the ranks."""
        if not ray.is_initialized():
            ray.init()
        self._started = True

    def run(self, worker_fn: Callable[..., Any], callbacks: list[Callable[..., Any]] | None = None,
            with_executable: bool = False) -> list[Any]:
        """Runs worker_fn() on every rank until the job ends, when one has returned; returns the results in rank order.

        Args:
            worker_fn: trains in a function of @hvd.elastic.run, as in any elastic job.
            callbacks: functions called here with each dict that a rank passes to ray_logger.log().
            with_executable: call worker_fn(executable) instead, see RayExecutor.
        Raises:
            RuntimeError: start() was not called; or the job failed: too few slots for too long, too many resets, or no
                rank left that has the state. No rank is left running.
        """
        if not self._started:
            raise RuntimeError("call start() first")
        function = worker_fn if with_executable else lambda executable: worker_fn()
        secret_key = make_secret_key()
        secret = base64.b64decode(secret_key)
        address = ray.util.get_node_ip_address()
        bound = "127.0.0.1" if address == "127.0.0.1" else EVERY_INTERFACE
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        hosts = HostManager(self._discovery, self._settings.cooldown_range)
        first = self._discovery.find_available_hosts_and_slots()
        with ExitStack() as stack:
            messages = stack.enter_context(Messages(callbacks))
            rendezvous = stack.enter_context(Rendezvous(secret, bound))
            service = stack.enter_context(Service(secret, lambda *event: events.put(event), WORKER_SAYS, bound))

            def environment(slot):
                own = worker_environment({}, slot, address, rendezvous.port, secret_key, "")
                return {**own, **self.env_vars, **nics_to_env_var(self._settings.nics),
                        "HOROVOD_ELASTIC": "1", DRIVER: join_address(address, service.port),
                        "BAGUA_HVD_HOST_ID": slot.hostname}

            crew = _Crew(function, environment, self._resources, self.executable, self._settings.nics, messages.queue,
                         service, lambda number, *how: events.put(("ended", number, how)))
            stack.callback(crew.close)
            driver = ElasticDriver(self._settings, hosts, crew, rendezvous.rank_ended)
            driver.hosts_found(first)
            stack.enter_context(searched(self._discovery, lambda found: events.put(("hosts", None, found)), crew.say))
            drive(driver, events, messages.deliver)
            return crew.results()

    def shutdown(self) -> None:
        """Does nothing but allow another start(): run() leaves nothing behind."""
        self._started = False


class _Crew:
    """Like the Crew of runner/elastic/run.py, with actors instead of processes.

    Args:
        function: of the executable. environment: function of a SlotInfo. resources: Resources of a rank.
        executable: arguments of start_executable(). nics: see ElasticParameters. queue: see Messages.
        on_end: function of (number, exit code, note, because_of).
    """

    def __init__(self, function, environment, resources, executable, nics, queue, service, on_end):
        self._function = ray.put(function)
        self._environment = environment
        self._resources = resources
        self._executable = executable
        self._nics = ",".join(sorted(interface_names(nics) or ()))
        self._queue = queue
        self._service = service
        self._on_end = on_end
        self._lock = threading.Lock()
        self._actors = {}
        self._stopped = set()
        self._closed = False
        self._results = {}

    def start(self, number, host, slot):
        threading.Thread(target=self._run, args=(number, host, slot), name="elastic worker", daemon=True).start()

    def _run(self, number, host, slot):
        """Runs an actor from its start to its end."""
        code, note, because_of = _FAILED, None, None
        try:
            actor = self._begin(number, host)
            ray.get([actor.update_env_vars.remote({**self._environment(slot), WORKER: str(number)}),
                     actor.set_queue.remote(self._queue), actor.start_executable.remote(*self._executable)])
            result = ray.get(actor.run_elastic.remote(self._function))
            if result is not None:
                self._results[result[0]] = result[1]
            code = 0
        except RayActorError as error:
            code, note = _KILLED, str(error).strip().splitlines()[0]
        except RayTaskError as error:
            note = f"{type(error.cause).__name__}: {error.cause}"
            because_of = getattr(error.cause, BECAUSE_OF, None)
            self.say(f"baguarun: {error}")
        except Exception as error:      # of any kind: the driver waits until a worker's end is reported
            note = f"{type(error).__name__}: {error}"
        self.stop(number)
        self._on_end(number, code, note, because_of)

    def _begin(self, number, host):
        nodes = _nodes()
        node = nodes.get(host) or next((node for node in nodes.values() if host in (
            node["NodeID"], node["NodeManagerAddress"], node["NodeManagerHostname"])), None)
        if node is None:
            raise RuntimeError(f"Ray has no living node {host}")
        with self._lock:
            if self._closed or number in self._stopped:
                raise RuntimeError("not started")
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            actor = ray.remote(BaseHorovodWorker).options(
                **self._resources.options(), scheduling_strategy=strategy,
                runtime_env=_ALL_GPUS if self._resources.use_gpu else None).remote()
            self._actors[number] = actor
            return actor

    def stop(self, number, grace_seconds=0):
        """Kills the actor: Ray has no gentler method to end one whose method is running."""
        with self._lock:
            self._stopped.add(number)
            actor = self._actors.pop(number, None)
        if actor is not None:
            with suppress(RayError, ValueError):        # it has ended by itself
                ray.kill(actor)

    def place(self, number, slot):
        pass

    def interface(self, host, hosts):
        return self._nics

    def send(self, number, message):
        self._service.send(number, message)

    def say(self, text):
        print(text.replace("baguarun:", "bagua_hvd.ray:", 1), file=sys.stderr, flush=True)

    def results(self):
        """The results in rank order."""
        return [self._results[rank] for rank in sorted(self._results)]

    def close(self):
        with self._lock:
            self._closed = True     # a thread may be about to create one more
        for number in list(self._actors):
            self.stop(number)
