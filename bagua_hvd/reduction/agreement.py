"""What the ranks tell each other of one optimizer before its first gradients travel: one small allreduce."""
from collections.abc import Sequence
from typing import NamedTuple

from bagua_hvd.collectives.facts import extremes
from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.training.buckets import Member
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Source

DIFFERENT_VARIABLES = "Ranks have gradients for different variables, {counts}; this rank has them for {names}"
_NAMES_SHOWN = 8


def listed(names: Sequence[str]) -> str:
    """Names in a sentence, not too many of them."""
    return ", ".join(names if len(names) <= _NAMES_SHOWN else
                     [*names[:_NAMES_SHOWN], f"{len(names) - _NAMES_SHOWN} more"])


class Agreed(NamedTuple):
    """What all ranks know now.

    sparse: the gradients that any rank has sparse, with the leading dimensions of which entries are held.
    order: all gradients, as the buckets are to hold them. step: the latest.
    differ: ranks are in different steps, have another order, or only some have state that is equal on all.
    own_differs: only some have state of their own. complete: no rank has joined, and so has said nothing.
    """

    sparse: dict[int, int]
    order: list[int]
    step: int
    differ: bool
    own_differs: bool
    complete: bool


def agree(name: str, group: ProcessSet, members: Sequence[Member], source: Source, order: Sequence[int],
          model: Model) -> Agreed:
    """Tells the ranks of the group this one's facts, and learns theirs; collective.

    Args:
        name: of the gradients. order: this rank's.
    Raises:
        HorovodInternalError: on all ranks, that their gradients are for different variables.
    """
    size, count = group.size(), len(members)
    present = [int(rank == group.rank()) for rank in range(size)]
    sparse = [source.sparse_dim(index) for index in range(count)]
    places = {index: place for place, index in enumerate(order)}
    try:
        facts = extremes([*present, *sparse, *(places[index] for index in range(count)), model.step,
                          *map(int, model.kinds_of_state()), source.fingerprint()], f"{name}.facts", group)
    except HorovodInternalError as error:
        if error.status != native.ERR_MISMATCH:
            raise
        # There are more facts on some ranks than on others, and all ranks have heard it.
        raise _different_variables(name, group, members) from error
    largest, smallest = facts.pop()
    if largest != smallest:
        raise _different_variables(name, group, members)
    of_ranks, of_sparse, of_places = facts[:size], facts[size:size + count], facts[size + count:-3]
    step, own, kept = facts[-3:]
    return Agreed(
        sparse={index: largest for index, (largest, _) in enumerate(of_sparse) if largest},
        order=sorted(range(count), key=lambda index: (of_places[index][0], index)),
        step=step[0],
        differ=any(largest != smallest for largest, smallest in (*of_places, step, kept)),
        own_differs=own[0] != own[1],
        complete=all(largest for largest, _ in of_ranks),
    )


def _different_variables(name: str, group: ProcessSet, members: Sequence[Member]) -> HorovodInternalError:
    """The error that says so, with what all ranks tell each other for it; collective."""
    mine = [len(members) if rank == group.rank() else 0 for rank in range(group.size())]
    counts = [largest for largest, _ in extremes(mine, f"{name}.counts", group)]
    known = [(count, rank) for count, rank in zip(counts, group.ranks or (), strict=True) if count > 0]
    (fewest, one), (most, other) = min(known), max(known)
    error = HorovodInternalError(DIFFERENT_VARIABLES.format(
        counts=f"{most} on each" if fewest == most else f"{fewest} on rank {one} and {most} on rank {other}",
        names=listed([member.name for member in members]),
    ))
    error.status = native.ERR_MISMATCH
    return error
