"""Stores an algorithm's state in the state_dict of its optimizer.

It is in the first parameter group, as bytes. Code that rebuilds a state_dict from its groups and states, such as
torch.distributed.checkpoint, keeps it there, and can load it into an optimizer that has made no step.
"""
import io
import pickle
from typing import Any

from bagua_hvd.core import objects
from bagua_hvd.job import basics
from bagua_hvd.job.process_sets import context_and_id

# The only key that DistributedOptimizer adds to a state_dict, and only with an algorithm that may have state.
STATE_KEY = "bagua_hvd"
_OF_RANKS = "of_ranks"


class _Plain(pickle.Unpickler):
    """Unpickles only dicts, lists, numbers, strings and bytes: a checkpoint may come from anybody."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"the state of an algorithm in the checkpoint holds a {module}.{name}, which "
                                     "bagua_hvd never saves")


def with_kept(state: dict, kept: dict) -> dict:
    """A copy of an optimizer's state_dict(), with the state of its algorithm."""
    first, *others = state["param_groups"]
    return {**state, "param_groups": [{**first, STATE_KEY: pickle.dumps(kept, 4)}, *others]}


def kept_in(state: dict) -> dict:
    """The state that with_kept() put into a state_dict; {} if none."""
    kept = state["param_groups"][0].get(STATE_KEY)
    return _Plain(io.BytesIO(kept)).load() if kept else {}


def gathered(state: dict, process_set: Any) -> dict:
    """An optimizer's state_dict() with the algorithm state of every rank instead of only this one's. Collective.

    Args:
        state: not changed; returned as it is if no rank has algorithm state. If the algorithm never has any, which is
            equal on all ranks, nothing is sent.
        process_set: the optimizer's.
    """
    if STATE_KEY not in state["param_groups"][0] or basics.size() == 1 or not process_set.included():
        return state
    context, id = context_and_id(process_set)
    of_ranks = objects.allgather_object(context, kept_in(state), "rank_states", id)
    return with_kept(state, {_OF_RANKS: of_ranks}) if any(of_ranks) else state


def of_this_rank(state: dict, process_set: Any) -> dict:
    """The algorithm state for this rank in a state_dict: its own, or rank 0's if it has none."""
    kept = kept_in(state)
    of_ranks = kept.get(_OF_RANKS)
    if of_ranks is None:
        return kept
    place = process_set.rank() if process_set.included() else 0
    own: dict = of_ranks[place if place < len(of_ranks) else 0]
    return own


def places(kept: dict, names: list, unnamed: dict) -> list:
    """The index among `names` of each parameter that a state names.

    Args:
        names: of the optimizer's parameters. unnamed: name in a state that was saved without names -> one of these.
    Raises:
        ValueError: a parameter of the state is not among them.
    """
    index_of = {name: index for index, name in enumerate(names)}
    found = [index_of.get(name, index_of.get(unnamed.get(name))) for name in kept["names"]]
    if None in found:
        missing = kept["names"][found.index(None)]
        raise ValueError(
            f"the checkpoint has state of {kept['algorithm']} for parameter {missing}, and this optimizer has no "
            f"parameter of this name: pass the named_parameters that it was saved with, or delete "
            f'"{STATE_KEY}" from the first of its param_groups, and the algorithm starts without its state'
        )
    return found
