"""The numbers of optimizers, by which ranks match the operations of each of them.

In an elastic job a rank that joins may have made other Reducers than the others, in another order. So from then on
Reducers of equal settings and members, which have equal keys, get their numbers in the order of their first use, which
is the same on all ranks. One run of a tf.compat.v1 graph uses Reducers in any order, so there keys must differ.
"""
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from bagua_hvd.job.runtime import runtime

reducers: weakref.WeakSet[Any] = weakref.WeakSet()      # all Reducers of this process


def optimizer_number(process_set: Any = 0) -> int:
    """The next number of an optimizer on a process set, from 0 after each init(): ranks use equal operation names.

    Each set has its own numbers, since ranks outside of it may have no such optimizer; remove_process_set() ends them.
    In an elastic job the numbers continue after a reset, since the optimizers are kept; see share_numbers().
    """
    number = runtime.optimizers.get(process_set, 0)
    runtime.optimizers[process_set] = number + 1
    return number


def number_of(reducer: Any) -> int:
    """A number for a Reducer that has none and is used: the next that rank 0 has shared for its key, or a new one."""
    shared = _shared(reducer)
    return shared.pop(0) if shared else optimizer_number(reducer.group.process_set_id)


def takes_one_of(reducer: Any, numbers: Any) -> bool:
    """Whether a Reducer has one of these numbers. One that has none takes its next, if rank 0 has shared that."""
    shared = _shared(reducer)
    return (reducer.number if shared and shared[0] in numbers else reducer.numbered) in numbers


def share_numbers(optimizers: Sequence[Any], broadcast: Callable[[Any], Any]) -> None:
    """Gives optimizers on all ranks the numbers that they have on rank 0; other Reducers get theirs when used next.

    Collective. Drops pending gradients of Reducers that are not in `optimizers`.

    Args:
        optimizers: objects with `number` and `renumber(number)`, in the same order on all ranks, which are matched by
            this order; None on a rank outside of a process set.
        broadcast: function that returns rank 0's object.
    """
    take_numbers(optimizers, broadcast(numbers_of(optimizers)))


def numbers_of(optimizers: Sequence[Any]) -> Any:
    """The argument for take_numbers() on all ranks."""
    shared: dict[Any, list[int]] = {}
    for reducer in _others(optimizers):
        if reducer.numbered is not None:
            shared.setdefault(_key(reducer), []).append(reducer.number)
    numbers = [optimizer if optimizer is None else optimizer.number for optimizer in optimizers]
    return numbers, {key: sorted(of_key) for key, of_key in shared.items()}, runtime.optimizers


def take_numbers(optimizers: Sequence[Any], given: Any) -> None:
    """The part of share_numbers() that follows the broadcast."""
    numbers, runtime.shared_numbers, of_sets = given
    runtime.optimizers = {**runtime.optimizers, **of_sets}      # rank 0 does not know those of sets without it
    for optimizer, number in zip(optimizers, numbers, strict=True):
        if optimizer is not None and number is not None:
            optimizer.renumber(number)
    for reducer in _others(optimizers):
        reducer.reset()
        reducer.renumber(None)


def _others(optimizers):
    known = set(map(id, optimizers))
    return [reducer for reducer in reducers if id(reducer) not in known]


def _key(reducer):
    return reducer.group.process_set_id, reducer.key


def _shared(reducer):
    """The numbers that rank 0 had for Reducers with this key in share_numbers(), and that none has taken since."""
    return (runtime.shared_numbers or {}).get(_key(reducer), [])
