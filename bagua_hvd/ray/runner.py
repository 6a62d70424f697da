"""Jobs on Ray: the ranks are actors, and the driver hosts their rendezvous."""
import base64
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import ray

from bagua_hvd.job.channel import HOROVOD_SECRET_KEY, make_secret_key
from bagua_hvd.job.rendezvous import Rendezvous
from bagua_hvd.job.server import EVERY_INTERFACE
from bagua_hvd.ray.elastic import ElasticRayExecutor
from bagua_hvd.ray.utils import nics_to_env_var
from bagua_hvd.ray.worker import Messages, Resources, placed
from bagua_hvd.runner.common.util.hosts import slots_on
from bagua_hvd.runner.common.util.timeout import Timeout


@dataclass
class MiniSettings:
    """How ranks are started. Settings for ssh are accepted for compatibility with Horovod: Ray starts the ranks.

    Args:
        nics: names of the allowed interfaces; None: the one towards the rendezvous.
        timeout_s: seconds until all ranks must have called init(). placement_group_timeout_s: to wait for resources.
    """

    nics: Any = None
    verbose: int = 1
    key: Any = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: int = 300
    placement_group_timeout_s: int = 100
    elastic: bool = False

    @property
    def start_timeout(self) -> Timeout:
        """A deadline that begins now."""
        return Timeout(self.timeout_s, "Timed out waiting for {activity}: check that the nodes can reach each other")


class Coordinator:
    """Numbers the ranks and hosts the rendezvous of a job whose ranks another component starts.

    Args:
        settings: MiniSettings, or an object with nics, key (the job's secret, base64; None: a new one) and timeout_s.
    """

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.rendezvous: Rendezvous | None = None
        self._hosts: dict[int, tuple[str, str]] = {}     # rank -> (host name, node)

    @property
    def world_size(self) -> int:
        """Number of ranks registered so far."""
        return len(self._hosts)

    @property
    def hostnames(self) -> set[str]:
        """Names of the hosts with ranks."""
        return {hostname for hostname, _ in self._hosts.values()}

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """Registers a rank on a node."""
        self._hosts[world_rank] = hostname, node_id

    def finalize_registration(self) -> dict[int, dict[str, str]]:
        """Called once ranks 0, 1, ... are all registered: {rank: its environment variables}."""
        return {slot.rank: slot.environment
                for slot in slots_on([self._hosts[rank][1] for rank in range(self.world_size)])}

    def establish_rendezvous(self) -> dict[str, str]:
        """The variables common to all ranks. The rendezvous lives in this process, until close() or its end."""
        key = getattr(self.settings, "key", None) or make_secret_key()
        key = key.decode() if isinstance(key, bytes) else key
        address = ray.util.get_node_ip_address()
        self.close()
        self.rendezvous = Rendezvous(base64.b64decode(key), "127.0.0.1" if address == "127.0.0.1" else EVERY_INTERFACE)
        weakref.finalize(self, self.rendezvous.close)
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.rendezvous.port),
            "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", HOROVOD_SECRET_KEY: key,
            "HOROVOD_START_TIMEOUT": str(self.settings.timeout_s), **nics_to_env_var(self.settings.nics)}

    def environments(self, places: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
        """All variables of each rank.

        Args:
            places: (host name, node) of ranks 0, 1, ...
        """
        for rank, (hostname, node_id) in enumerate(places):
            self.register(hostname, node_id, rank)
        common = self.establish_rendezvous()
        # Ray's nodes count as hosts, even if two of them are on one machine.
        return [{**common, **place, "HOROVOD_HOSTNAME": places[rank][1], "BAGUA_HVD_HOST_ID": places[rank][1]}
                for rank, place in self.finalize_registration().items()]

    def close(self) -> None:
        """Ends the rendezvous. Idempotent."""
        if self.rendezvous is not None:
            self.rendezvous.close()
            self.rendezvous = None


class RayExecutor:
    """A job of Ray actors as ranks: start() creates them, run() and execute() call functions there; shutdown().

    Args:
        settings: from create_settings(); None: its defaults.
        num_workers: ranks, wherever there are resources; or num_hosts: nodes with num_workers_per_host ranks each.
        cpus_per_worker, gpus_per_worker: resources of each rank. use_gpu: whether they have GPUs, one by default.
            A rank sees all GPUs of its node's ranks, and uses the one with number hvd.local_rank().
        use_current_placement_group: puts the actors into the caller's placement group, if there is one.
        min_workers, max_workers, reset_limit, cooldown_range, elastic_timeout, override_discovery: of an elastic job;
            min_workers makes the job elastic; see ElasticRayExecutor.
    Raises:
        ValueError: numbers that exclude each other.
    """

    def __init__(self, settings: Any, num_workers: int | None = None, num_hosts: int | None = None,
                 num_workers_per_host: int = 1, cpus_per_worker: int = 1, use_gpu: bool = False,
                 gpus_per_worker: int | None = None, use_current_placement_group: bool = True,
                 min_workers: int | None = None, max_workers: int | None = None, reset_limit: int | None = None,
                 cooldown_range: Any = None, elastic_timeout: int = 600, override_discovery: bool = True) -> None:
        self._elastic: ElasticRayExecutor | None = None
        settings = settings or self.create_settings()
        resources = Resources(cpus_per_worker, use_gpu, gpus_per_worker)
        if min_workers is None and (max_workers is not None or reset_limit is not None or cooldown_range is not None):
            raise ValueError("max_workers, reset_limit and cooldown_range are for elastic jobs: give min_workers too")
        if min_workers is not None:
            if num_hosts is not None:
                raise ValueError("num_hosts is for jobs of fixed size: leave it out, or min_workers")
            settings = ElasticRayExecutor.create_settings(
                min_workers, max_workers, reset_limit, elastic_timeout, settings.timeout_s, nics=settings.nics,
                num_proc=num_workers, cooldown_range=cooldown_range, discovery=getattr(settings, "discovery", None))
            self._elastic = ElasticRayExecutor(settings, use_gpu, cpus_per_worker, gpus_per_worker,
                                               override_discovery=override_discovery)
            return
        if (num_workers is None) == (num_hosts is None):
            raise ValueError("give either num_workers, or num_hosts with num_workers_per_host (min_workers makes the "
                             "job elastic)")
        counts = [1] * num_workers if num_workers is not None else [num_workers_per_host] * (num_hosts or 0)
        if not counts or min(counts) < 1:
            raise ValueError("num_workers, num_hosts and num_workers_per_host: give 1 or more")
        self._coordinator = Coordinator(settings)
        self._place = (counts, resources, num_hosts is not None, use_current_placement_group,
                       settings.placement_group_timeout_s)
        self._actors: list[Any] = []
        self._running = ExitStack()         # ends them

    @classmethod
    def create_settings(cls, timeout_s: int = 30, ssh_identity_file: str | None = None, ssh_str: str | None = None,
                        placement_group_timeout_s: int = 100, nics: Any = None) -> MiniSettings:
        """The settings for the constructor.

        Args:
            timeout_s: seconds until all ranks must have called init(). placement_group_timeout_s: to wait for
                resources. nics: names of the allowed interfaces; None: the one towards the driver.
            ssh_identity_file, ssh_str: no effect; Ray starts the ranks.
        """
        return MiniSettings(timeout_s=timeout_s, ssh_identity_file=ssh_identity_file, nics=nics,
                            placement_group_timeout_s=placement_group_timeout_s)

    def start(self, executable_cls: Callable[..., Any] | None = None, executable_args: list[Any] | None = None,
              executable_kwargs: dict[str, Any] | None = None, extra_env_vars: dict[str, str] | None = None) -> None:
        """Creates the actors, and in each of them executable_cls(*executable_args, **executable_kwargs).

        Args:
            executable_cls: class of the object that execute() passes to its functions; None: there is none.
            extra_env_vars: environment variables of the ranks.
        Raises:
            TimeoutError: Ray has not enough resources. Exceptions of the class.
        """
        executable = executable_cls, executable_args, executable_kwargs
        if self._elastic is not None:
            self._elastic.executable, self._elastic.env_vars = executable, extra_env_vars or {}
            self._elastic.start()
            return
        self.shutdown()
        with ExitStack() as stack:
            stack.callback(self._coordinator.close)
            workers, nodes = placed(stack, *self._place)
            hostnames = ray.get([worker.hostname.remote() for worker in workers])
            environments = self._coordinator.environments(list(zip(hostnames, nodes, strict=True)))
            if self._place[1].use_gpu:
                _share_gpus(workers, nodes, environments)
            ray.get([worker.update_env_vars.remote({**environment, **(extra_env_vars or {})})
                     for worker, environment in zip(workers, environments, strict=True)])
            ray.get([worker.start_executable.remote(*executable) for worker in workers])
            self._actors, self._running = workers, stack.pop_all()

    @property
    def _workers(self):
        """The actors of a job of fixed size."""
        if self._elastic is not None:
            raise NotImplementedError("the ranks of an elastic job come and go: use run() or execute()")
        if not self._actors:
            raise RuntimeError("there are no ranks: call start() first")
        return self._actors

    def run(self, fn: Callable[..., Any], args: list[Any] | None = None, kwargs: dict[str, Any] | None = None,
            callbacks: list[Callable[..., Any]] | None = None) -> list[Any]:
        """Calls fn(*args, **kwargs) on every rank; returns the results in rank order.

        Args:
            callbacks: functions called here with each dict that a rank passes to ray_logger.log().
        Raises:
            Exceptions of fn on a rank (as ray.exceptions.RayTaskError); that rank leaves the job, and the others' next
            collective fails. RayActorError: a rank died; the text names it. RuntimeError: an elastic job failed.
        """
        return self.execute(lambda executable: fn(*(args or []), **(kwargs or {})), callbacks)

    def run_remote(self, fn: Callable[..., Any], args: list[Any] | None = None,
                   kwargs: dict[str, Any] | None = None) -> list[Any]:
        """Like run(), but returns ray.ObjectRefs at once. NotImplementedError: the job is elastic."""
        return [worker.run.remote(fn, args or [], kwargs or {}) for worker in self._workers]

    def execute(self, fn: Callable[[Any], Any], callbacks: list[Callable[..., Any]] | None = None) -> list[Any]:
        """Calls fn(executable) on every rank; returns the results in rank order. See run()."""
        if self._elastic is not None:
            return self._elastic.run(fn, callbacks, with_executable=True)
        with Messages(callbacks) as messages:
            messages.results([worker.set_queue.remote(messages.queue) for worker in self._workers])
            return messages.results([worker.execute.remote(fn) for worker in self._workers])

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls fn(executable) on rank 0; returns its result. NotImplementedError: the job is elastic."""
        return Messages(None).results([self._workers[0].execute.remote(fn)])[0]

    def shutdown(self) -> None:
        """Ends the actors. start() may be called again."""
        if self._elastic is not None:
            self._elastic.shutdown()
        else:
            self._actors = []
            self._running.close()


def _share_gpus(workers, nodes, environments):
    """Lets each rank see the GPUs of all ranks on its node, in rank order."""
    of_node: dict[str, list] = {}
    for node, ids in zip(nodes, ray.get([worker.get_gpu_ids.remote() for worker in workers]), strict=True):
        of_node.setdefault(node, []).extend(ids)
    for node, environment in zip(nodes, environments, strict=True):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(of_node[node]))
