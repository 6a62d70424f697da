"""The ranks of a job on Ray: the actor that is one, their placement, and their results."""
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from bagua_hvd.core import variables
from bagua_hvd.job import basics
from bagua_hvd.job.elastic_worker import RemovedFromJob
from bagua_hvd.job.environment import get_env_rank_and_size
from bagua_hvd.ray import ray_logger
from bagua_hvd.runner.reports import first_cause

BECAUSE_OF = "bagua_hvd_because_of"
_POLL_SECONDS = 0.1


class BaseHorovodWorker:
    """A class for ray.remote() to make an actor of.

    Args:
        world_rank, world_size: for HOROVOD_RANK and HOROVOD_SIZE; an executor sets them once all actors exist.
    Attributes:
        executable: the object created by start_executable(); or None.
    """

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self.executable: Any = None
        self.update_env_vars({"HOROVOD_HOSTNAME": self.node_id(), "HOROVOD_RANK": str(world_rank),
                              "HOROVOD_SIZE": str(world_size)})

    def node_id(self) -> str:
        """Ray's id of the node."""
        return ray.get_runtime_context().get_node_id()

    def hostname(self) -> str:
        """The node's host name."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[str]:
        """The GPUs that Ray gave to this actor."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def update_env_vars(self, env_vars: dict[str, Any]) -> None:
        """Sets environment variables of this process, values as text."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """The environment of this process."""
        return dict(os.environ)

    def set_queue(self, queue: Any) -> None:
        """Sets the destination of this process's ray_logger.log(); None discards the messages."""
        ray_logger.configure(queue)

    def start_executable(self, executable_cls: Callable[..., Any] | None = None, executable_args: Any = None,
                         executable_kwargs: Any = None) -> None:
        """Creates the object that execute() passes to its functions; class None: there is no object."""
        if executable_cls:
            self.executable = executable_cls(*(executable_args or []), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Calls func(executable). See run()."""
        return self.run(func, (self.executable,), {})

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls func(*args, **kwargs). If it raises, this rank leaves the job, so that the others do not wait for it.

        The exception gets an attribute `bagua_hvd_because_of`: the rank whose loss preceded it; None: there is none.
        """
        try:
            return func(*args, **kwargs)
        except BaseException as error:
            lost = basics.context().first_loss().rank if basics.is_initialized() else None
            setattr(error, BECAUSE_OF, lost)
            basics.shutdown()
            raise

    def run_elastic(self, func: Callable[..., Any]) -> tuple[int, Any] | None:
        """Returns (rank, func(executable)); None: this rank has no slot in the elastic job any more. See run()."""
        try:
            result = self.execute(func)
        except RemovedFromJob:
            return None
        rank, _ = get_env_rank_and_size()
        basics.shutdown()           # the process stays for a while, and the others may need a rendezvous without it
        return rank, result


@dataclass(frozen=True)
class Resources:
    """Resources of one rank.

    Args:
        cpus: number of Ray CPUs, fractions allowed. use_gpu: whether it has GPUs. gpus: number; None: 1 if use_gpu.
    Raises:
        ValueError: gpus without use_gpu.
    """

    cpus: float = 1
    use_gpu: bool = False
    gpus: float | None = None

    def __post_init__(self) -> None:
        if self.gpus and not self.use_gpu:
            raise ValueError("gpus_per_worker is set, but use_gpu is False: set use_gpu=True, or leave it out")
        if self.use_gpu and self.gpus is not None and self.gpus < 1:
            raise ValueError(f"gpus_per_worker={self.gpus}: give 1 or more with use_gpu=True, or leave it out")

    @property
    def gpu_count(self) -> float:
        """Number of GPUs; 0 without use_gpu."""
        return (self.gpus or 1) if self.use_gpu else 0

    def bundle(self, ranks: int = 1) -> dict[str, float]:
        """The resources of `ranks` ranks, for a placement group."""
        bundle = {"CPU": self.cpus * ranks}
        return {**bundle, "GPU": self.gpu_count * ranks} if self.use_gpu else bundle

    def options(self) -> dict[str, float]:
        """Arguments of an actor's options()."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpu_count}


def placed(stack: ExitStack, counts: Sequence[int], resources: Resources, spread: bool, use_current: bool,
           timeout_s: float) -> tuple[list[Any], list[str]]:
    """Creates the actors of a job of fixed size: (actors, the node of each); those of a node are consecutive.

    Args:
        stack: will kill the actors, and release the resources reserved for them.
        counts: ranks of each bundle. resources: of each rank. spread: one bundle on each node; else as close to each
            other as resources allow.
        use_current: puts the actors into the caller's placement group, if there is one.
        timeout_s: seconds to wait for resources.
    Raises:
        TimeoutError: there were none in time.
    """
    group = get_current_placement_group() if use_current else None
    places, own = [-1] * sum(counts), group is None
    if own:
        group = _group(counts, resources, spread, timeout_s)
        stack.callback(remove_placement_group, group)
        places = [bundle for bundle, count in enumerate(counts) for _ in range(count)]
    actor, workers = ray.remote(BaseHorovodWorker), []
    for place in places:
        workers.append(actor.options(**resources.options(), scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=place)).remote())
        stack.callback(ray.kill, workers[-1])
    try:
        # Whether the caller's group has enough free resources is known only once the actors run.
        nodes = ray.get([worker.node_id.remote() for worker in workers], timeout=None if own else timeout_s)
    except GetTimeoutError:
        raise TimeoutError(
            f"the current placement group has had no room for {sum(counts)} workers ({resources.bundle()} each) "
            f"for {timeout_s:g} s: give it more, ask for less, or set use_current_placement_group=False") from None
    order = list(dict.fromkeys(nodes))
    by_node = sorted(range(len(nodes)), key=lambda i: order.index(nodes[i]))
    return [workers[i] for i in by_node], [nodes[i] for i in by_node]


def _group(counts, resources, spread, timeout_s):
    group = placement_group([resources.bundle(count) for count in counts], "STRICT_SPREAD" if spread else "PACK")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise TimeoutError(
            f"Ray has had no room for {sum(counts)} workers ({resources.bundle()} each"
            + (f", {counts[0]} on each of {len(counts)} nodes" if spread else "")
            + f") for {timeout_s:g} s; the cluster has {ray.cluster_resources()}, of which "
            f"{ray.available_resources()} are free: ask for less, or give a longer placement_group_timeout_s")
    return group


class Messages:
    """A queue from ranks to callbacks: messages that ranks log (ray_logger); it also collects the ranks' results. A
    context manager: after its exit, messages of the ranks are lost.

    Args:
        callbacks: functions of a message; None or empty: there is no queue.
    Attributes:
        queue: for BaseHorovodWorker.set_queue(); None without callbacks.
    """

    def __init__(self, callbacks: Sequence[Callable[[Any], Any]] | None) -> None:
        self._callbacks = list(callbacks or ())
        self.queue = None
        if self._callbacks:     # on the driver's node, since Ray might choose one that is removed
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            self.queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})

    def deliver(self) -> None:
        """Calls the callbacks with the messages that have arrived."""
        while self.queue is not None:
            try:
                message = self.queue.get_nowait()
            except Empty:
                return
            for callback in self._callbacks:
                callback(message)

    def results(self, references: Sequence[Any]) -> list[Any]:
        """Waits for the results of ranks 0, 1, ..., or until one fails; returns them.

        Raises:
            The exception of the first failed rank; or of the rank that caused it, if that fails within the grace period
            (BAGUA_HVD_GRACE_SECONDS). For a rank that died, a RayActorError that names it.
        """
        references = list(references)
        failed: dict[int, Exception] = {}
        waiting, limit = references, 0.0
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_POLL_SECONDS if self.queue or failed else None)
            self.deliver()
            for reference in done:
                try:
                    ray.get(reference)
                except Exception as error:
                    limit = limit or time.monotonic() + variables.read("BAGUA_HVD_GRACE_SECONDS")
                    failed[references.index(reference)] = error
            if failed:
                rank, known = _cause(failed)
                if known or not waiting or time.monotonic() > limit:
                    first = failed[rank]
                    if isinstance(first, RayActorError):
                        first.error_msg = f"rank {rank} died. {first}"
                    raise first
        self.deliver()
        return ray.get(references)

    def __enter__(self) -> "Messages":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.queue is not None:
            self.queue.shutdown(force=True)


def _cause(failed):
    """(rank, whether no earlier failure of another rank is missing). failed: {rank: error}, in order of arrival."""
    because_of = {rank: getattr(getattr(error, "cause", None), BECAUSE_OF, None) for rank, error in failed.items()}
    rank = first_cause(next(iter(failed)), because_of)
    return rank, because_of[rank] is None or because_of[rank] in failed
