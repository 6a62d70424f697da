"""DTensors: parameters that several ranks hold together, each a part (fully_shard, tensor parallelism).

    island          the ranks of one device mesh; torch reduces gradients within it
    counterparts    the ranks, one of each island, that hold the same parts; bagua_hvd communicates among these

so that hvd.DistributedOptimizer(optimizer, names, algorithm="diloco") trains with DiLoCo between islands.
"""
from collections.abc import Iterable
from typing import Any

import torch

from bagua_hvd.collectives.objects import allgather_object
from bagua_hvd.job import basics
from bagua_hvd.job.process_sets import ProcessSet, global_process_set, of_members


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "to_local")


@torch.no_grad()        # with gradients, a new tensor each time
def local(tensor: Any) -> Any:
    """The local tensor of a DTensor, which shares its memory; others, and None, unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_divided(tensor: Any) -> bool:
    """Whether the ranks of an island hold different parts of it."""
    return is_sharded(tensor) and not all(placement.is_replicate() for placement in tensor.placements)


@torch.no_grad()
def sum_up(parameter: torch.Tensor) -> None:
    """Reduces a DTensor's gradient within the island, if so far each rank there has only an addend of it."""
    gradient: Any = parameter.grad
    if is_sharded(gradient) and any(placement.is_partial() for placement in gradient.placements):
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def counterparts(parameters: Iterable[torch.Tensor], process_set: ProcessSet) -> ProcessSet:
    """The ranks that hold the same parts of these parameters as this one; `process_set` if none is a DTensor.

    With DTensors it is collective over the set. For the global set, it selects the ranks with the same coordinates in
    the meshes of other islands.

    Raises:
        ValueError: ranks of the given set hold different parts; all ranks are one island.
    """
    meshes = {parameter.device_mesh for parameter in parameters if is_sharded(parameter)}
    if not meshes or not process_set.included():
        return process_set
    mine = sorted((mesh.mesh.flatten().tolist(), tuple(mesh.get_coordinate())) for mesh in meshes)
    of_ranks = allgather_object(mine, "shards", process_set)
    places = [[place for _, place in each] for each in of_ranks]
    own = places[process_set.rank()]
    if process_set is not global_process_set:
        for rank, place in zip(process_set.ranks or [], places, strict=True):
            if place != own:
                raise ValueError(f"ranks {basics.rank()} and {rank} of the process set hold different parts of a "
                                 "DTensor: leave out process_set=, or give the set of those that hold the same part")
        return process_set
    ranks = [rank for rank, place in enumerate(places) if place == own]
    if len(ranks) == 1 < basics.size():
        raise ValueError(f"all {basics.size()} ranks hold one model together, as DTensors, and torch reduces their "
                         "gradients: use the torch optimizer as it is, or make several islands: "
                         "init_device_mesh('cpu', (2, n), mesh_dim_names=('island', 'shard')), and "
                         "fully_shard(model, mesh=mesh['shard'])")
    return of_members(basics.context(), ranks, basics.size())
