"""The numbers of optimizers, by which ranks match the operations of each of them.

In an elastic job a rank that joins may have made other Reducers than the others, in another order. So ranks match them
by key, their settings and members. Among equal keys those with equal names match first, then the order of creation
counts: names alone are not enough, since a rank that has made other models before has dense_7 instead of dense_2.
"""
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from bagua_hvd.job.runtime import runtime

_reducers: list[Any] = []       # weak references to all Reducers, in the order of creation


def optimizer_number(process_set: Any = 0) -> int:
    """The next number of an optimizer on a process set, from 0 after each init(): ranks use equal operation names.

    Each set has its own numbers, since ranks outside of it may have no such optimizer; remove_process_set() ends them.
    In an elastic job the numbers continue after a reset, since the optimizers are kept; see share_numbers().
    """
    number = runtime.optimizers.get(process_set, 0)
    runtime.optimizers[process_set] = number + 1
    return number


def number_of_new(reducer: Any) -> int:
    """The number of a new Reducer: of the one with its key on rank 0, unless another has used that number already."""
    living, shared = _living(), _shared(reducer)
    _reducers[:] = map(weakref.ref, [*living, reducer])
    if not shared:
        return optimizer_number(reducer.group.process_set_id)
    number = _take(shared, reducer)
    for other in living:        # made anew after a reset, as on ranks that have no older one
        if other.numbered == number and _key(other) == _key(reducer):
            other.renumber(None)
    return number


def number_is_used(reducer: Any) -> None:
    """Called when a Reducer is first used after share_numbers(): no new one gets its number."""
    shared = _shared(reducer)
    shared[:] = [entry for entry in shared if entry[1] != reducer.numbered]


def share_numbers(optimizers: Sequence[Any], broadcast: Callable[[Any], Any]) -> None:
    """Gives optimizers on all ranks the numbers that they have on rank 0, and equal numbers to later ones.

    Collective. Drops pending gradients of Reducers that are not in `optimizers`.

    Args:
        optimizers: objects with `number` and `renumber(number)`, in the same order on all ranks, which are matched by
            this order; None on a rank outside of a process set. Other Reducers are matched by key.
        broadcast: function that returns rank 0's object.
    """
    take_numbers(optimizers, broadcast(numbers_of(optimizers)))


def numbers_of(optimizers: Sequence[Any]) -> Any:
    """The argument for take_numbers() on all ranks."""
    shared: dict[Any, list[tuple[int, int]]] = {}
    # Those that were not used since the last time come last: most likely the rank that joins does not have them.
    for reducer in sorted(_others(optimizers), key=lambda reducer: reducer.awaits_use):
        if reducer.numbered is not None:
            shared.setdefault(_key(reducer), []).append((reducer.names, reducer.number))
    numbers = [optimizer if optimizer is None else optimizer.number for optimizer in optimizers]
    return numbers, shared, runtime.optimizers


def take_numbers(optimizers: Sequence[Any], given: Any) -> None:
    """The part of share_numbers() that follows the broadcast."""
    joins = runtime.shared_numbers is None
    numbers, runtime.shared_numbers, of_sets = given
    runtime.optimizers = {**runtime.optimizers, **of_sets}      # rank 0 does not know those of sets without it
    for optimizer, number in zip(optimizers, numbers, strict=True):
        if optimizer is not None and number is not None:
            optimizer.renumber(number)
    unmatched = {key: list(of_key) for key, of_key in runtime.shared_numbers.items()}
    for reducer in _others(optimizers):
        reducer.reset()
        equal = unmatched.get(_key(reducer), [])
        if joins:
            reducer.renumber(_take(equal, reducer) if equal else None)
        elif reducer.numbered not in {number for _, number in equal}:       # made after a failure, not on rank 0 yet
            reducer.renumber(None)
        reducer.await_use()


def _living():
    return [reducer for reference in _reducers if (reducer := reference()) is not None]


def _others(optimizers):
    known = set(map(id, optimizers))
    return [reducer for reducer in _living() if id(reducer) not in known]


def _key(reducer):
    return reducer.group.process_set_id, reducer.key


def _take(shared, reducer):
    place = next((place for place, (names, _) in enumerate(shared) if names == reducer.names), 0)
    return shared.pop(place)[1]


def _shared(reducer):
    """(names, number) of Reducers with this key that none has used since share_numbers(), in the order of creation."""
    return (runtime.shared_numbers or {}).get(_key(reducer), [])
