"""Placement of the actors of a job of fixed size: wherever there are resources, or a fixed number on each node."""
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bagua_hvd.ray.worker import BaseHorovodWorker


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


class Actors:
    """The actors of a job, and the placement group created for them. close() ends all.

    Args:
        counts: ranks of each bundle. resources: of each rank. spread: one bundle on each node; else as close to each
            other as resources allow.
        use_current: puts the actors into the caller's placement group, if there is one.
        timeout_s: seconds to wait for resources.
    Raises:
        TimeoutError: there were none in time.
    Attributes:
        workers: the actors; those of a node are consecutive.
    """

    def __init__(self, counts: Sequence[int], resources: Resources, spread: bool, use_current: bool,
                 timeout_s: float) -> None:
        self.workers: list[Any] = []
        self._own: PlacementGroup | None = None
        group = get_current_placement_group() if use_current else None
        try:
            if group is None:
                group = self._own = _group(counts, resources, spread, timeout_s)
                places = [bundle for bundle, count in enumerate(counts) for _ in range(count)]
            else:
                places = [-1] * sum(counts)
            actor = ray.remote(BaseHorovodWorker)
            self.workers = [
                actor.options(**resources.options(), scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=place)).remote() for place in places]
            # Whether the caller's group has enough free resources is known only once the actors run.
            nodes = ray.get([worker.node_id.remote() for worker in self.workers],
                            timeout=None if self._own else timeout_s)
        except GetTimeoutError:
            self.close()
            raise TimeoutError(
                f"the current placement group has had no room for {sum(counts)} workers ({resources.bundle()} each) "
                f"for {timeout_s:g} s: give it more, ask for less, or set use_current_placement_group=False") from None
        except BaseException:
            self.close()
            raise
        order = {node: place for place, node in enumerate(dict.fromkeys(nodes))}
        self.nodes = sorted(nodes, key=order.__getitem__)
        self.workers = [self.workers[i] for i in sorted(range(len(nodes)), key=lambda i: order[nodes[i]])]

    def close(self) -> None:
        """Kills the actors, and releases the resources reserved for them. Idempotent."""
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []
        if self._own is not None:
            remove_placement_group(self._own)
            self._own = None


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
