"""The numbers of optimizers, by which ranks match the operations of each of them."""
from collections.abc import Callable, Sequence
from typing import Any

from bagua_hvd.job.runtime import runtime


def optimizer_number(process_set: Any = 0) -> int:
    """The next number of an optimizer on a process set, from 0 after each init(): ranks use equal operation names.

    Each set has its own numbers, since ranks outside of it may have no such optimizer; remove_process_set() ends them.
    In an elastic job the numbers continue after a reset, since the optimizers are kept; see share_numbers().
    """
    number = runtime.optimizers.get(process_set, 0)
    runtime.optimizers[process_set] = number + 1
    return number


def share_numbers(optimizers: Sequence[Any], broadcast: Callable[[Any], Any]) -> None:
    """Gives optimizers on all ranks the numbers that they have on rank 0, and equal numbers to later ones.

    Collective. For elastic jobs, where a rank that joined later has made fewer optimizers than the others.

    Args:
        optimizers: objects with `number` and `renumber(number)`, in the same order on all ranks.
        broadcast: function that returns rank 0's object.
    """
    take_numbers(optimizers, broadcast(numbers_of(optimizers)))


def numbers_of(optimizers: Sequence[Any]) -> Any:
    """The argument for take_numbers() on another rank."""
    return [optimizer.number for optimizer in optimizers], runtime.optimizers


def take_numbers(optimizers: Sequence[Any], given: Any) -> None:
    """The part of share_numbers() that follows the broadcast."""
    numbers, runtime.optimizers = given
    for optimizer, number in zip(optimizers, numbers, strict=True):
        optimizer.renumber(number)
