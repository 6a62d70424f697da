"""One checkpoint for all ranks: what an algorithm keeps on each of them, gathered into one file and taken out again."""
from typing import Any

from bagua_hvd.collectives.rules import begin
from bagua_hvd.core import objects
from bagua_hvd.job import basics

# The one key that DistributedOptimizer adds to a state_dict, and only when its algorithm has state.
STATE_KEY = "bagua_hvd"
_OF_RANKS = "of_ranks"


def gathered(state: dict, process_set: Any) -> dict:
    """An optimizer's state_dict() with the algorithm's state of every rank in place of this one's. Collective.

    Args:
        state: not changed; one without such a state is returned as it is, if that is so on all ranks.
        process_set: the optimizer's.
    """
    if basics.size() == 1 or not process_set.included():
        return state
    context, id = begin(process_set)
    of_ranks = objects.allgather_object(context, state.get(STATE_KEY), "rank_states", id)
    return {**state, STATE_KEY: {_OF_RANKS: of_ranks}} if any(of_ranks) else state


def of_this_rank(state: dict, process_set: Any) -> dict:
    """What this rank takes up of the algorithm's state in a state_dict: its own, or rank 0's where it has none."""
    own = state.get(STATE_KEY) or {}
    if _OF_RANKS not in own:
        return own
    of_ranks = own[_OF_RANKS]
    place = process_set.rank() if process_set.included() else 0
    return of_ranks[place if place < len(of_ranks) else 0] or {}
