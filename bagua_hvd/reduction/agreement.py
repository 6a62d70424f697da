"""How ranks match the operations of an optimizer: by its number, and by an agreement before its first gradients.

In an elastic job a rank that joins may have made other Reducers than the others, in another order. So from then on
Reducers of equal settings and members, which have equal keys, get their numbers in the order of their first use, which
is the same on all ranks. One run of a tf.compat.v1 graph uses Reducers in any order, so there keys must differ.
"""
import re
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any
from zlib import crc32

from bagua_hvd.collectives.objects import extremes
from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import runtime
from bagua_hvd.training.buckets import Member
from bagua_hvd.training.model import Model

DIFFERENT_VARIABLES = "Ranks have gradients for different variables, {counts}; this rank has them for {names}"
DIFFERENT_NAMES = (
    "Ranks disagree on gradient {place}: on rank {one} it is that of {first}, on rank {other} that of {second}. List "
    "the same variables in the same order on all ranks, with equal names, dtypes and shapes"
)
_FOLLOWING = 8      # limit of optimizers with windows that end together
_NAMES_SHOWN = 8
_NAME_BYTES = 200
_NUMBERED = re.compile(r"(.*)_(\d+)")


def listed(names: Sequence[str]) -> str:
    """A list of names for a message, shortened if it is long."""
    return ", ".join(names if len(names) <= _NAMES_SHOWN else
                     [*names[:_NAMES_SHOWN], f"{len(names) - _NAMES_SHOWN} more"])


def _number(value: str) -> int:
    """A hash in the range of Extremes."""
    return crc32(value.encode()) % (2**31 - 1)


def _described(members: Sequence[Member]) -> list[str]:
    """The name, dtype and shape of each member, which ranks compare.

    Keras numbers the layers of a process: dense_7. A rank that has made other models before has other numbers, so their
    order is compared, not their values.
    """
    names = [[_numbered(part) for part in member.name.split("/")] for member in members]
    numbers: dict[str, set[int]] = {}
    for base, number in (part for parts in names for part in parts):
        numbers.setdefault(base, set()).add(number)
    places = {base: {number: place for place, number in enumerate(sorted(found))} for base, found in numbers.items()}
    known = ["/".join(f"{base}_{places[base][number]}" for base, number in parts) for parts in names]
    return [f"{name} {member.dtype} {member.shape}" for name, member in zip(known, members, strict=True)]


def fingerprint(members: Sequence[Member]) -> int:
    """A hash of the members, equal on all ranks."""
    return _number("\n".join(_described(members)))


def _numbered(part: str) -> tuple[str, int]:
    """A layer's name and its number: that of dense_7 is 7, that of dense 0."""
    match = _NUMBERED.fullmatch(part)
    return (match[1], int(match[2])) if match else (part, 0)


def agree(layout: Any, model: Model, order: Sequence[int],
          following: Set[int]) -> tuple[dict[int, int], list[int], set[int], bool]:
    """Exchanges facts with the other ranks of the model's group; collective.

    If ranks are in different steps, have different orders, or only some of them have state, all continue from the
    latest step, without earlier state.

    Args:
        layout: the Layout of the gradients. order: this rank's.
        following: offsets of the numbers of later optimizers with windows that end in the same pass.
    Returns:
        (gradients that are sparse on any rank -> the number of their sparse leading dimensions; all gradients as they
        became ready in the first backward pass, so that buckets hold those that become ready together; the union of
        `following` over the ranks; whether all have contributed, because no rank was in join()).
    Raises:
        HorovodInternalError: on all ranks, if their gradients are for different variables.
    """
    name, members, group, source = layout.name, layout.members, model.group, model.source
    size, count = group.size(), len(members)
    present = [int(rank == group.rank()) for rank in range(size)]
    sparse = [source.sparse_dim(index) for index in range(count)]
    places = {index: place for place, index in enumerate(order)}
    described = _described(members)
    try:
        facts = extremes([*present, *sparse, *(places[index] for index in range(count)),
                          *(int(behind + 1 in following) for behind in range(_FOLLOWING)),
                          model.step, *map(int, model.kinds_of_state()), _number("\n".join(described)),
                          source.fingerprint()], f"{name}.facts", group)
    except HorovodInternalError as error:
        if error.status != native.ERR_MISMATCH:
            raise
        # Some ranks have sent more facts than others, and all ranks get this error.
        raise _different_variables(name, group, members) from error
    facts, of_names, of_prints = facts[:-2], *facts[-2:]
    if of_names[0] != of_names[1]:
        raise _different_names(name, group, members, described)
    if of_prints[0] != of_prints[1]:
        raise _different_variables(name, group, members)
    of_ranks, of_sparse, of_places = facts[:size], facts[size:size + count], facts[size + count:size + 2 * count]
    of_following, (step, own, kept) = facts[size + 2 * count:-3], facts[-3:]
    differ = any(largest != smallest for largest, smallest in (*of_places, step, kept))
    if differ or own[0] != own[1]:
        model.step = step[0]
        model.drop_state(shared=differ)
    return ({index: largest for index, (largest, _) in enumerate(of_sparse) if largest},
            sorted(range(count), key=lambda index: (of_places[index][0], index)),
            {behind + 1 for behind, (largest, _) in enumerate(of_following) if largest},
            all(largest for largest, _ in of_ranks))


def _different_names(name: str, group: ProcessSet, members: Sequence[Member],
                     described: Sequence[str]) -> HorovodInternalError:
    """The error that names the first gradient on which ranks disagree; collective."""
    hashes = [_number(each) for each in described]
    found = extremes(hashes, f"{name}.names", group)
    place = next((place for place, (largest, smallest) in enumerate(found) if largest != smallest), 0)
    # The first rank that has the smallest hash, and the first that has the largest.
    size, ranks = group.size(), group.ranks or ()
    claims = [size - group.rank() if hashes[place] == hash else 0 for hash in reversed(found[place])]
    pair = sorted(size - claim for claim, _ in extremes(claims, f"{name}.disagree", group))
    member = members[place]
    mine = f"'{member.name}' ({native.dtype_name(member.dtype)}{list(member.shape)})".encode()[:_NAME_BYTES]
    texts = [byte for position in pair
             for byte in (mine if position == group.rank() else b"").ljust(_NAME_BYTES, b"\0")]
    gathered = bytes(largest for largest, _ in extremes(texts, f"{name}.named", group))
    first, second = (text.rstrip(b"\0").decode(errors="replace")
                     for text in (gathered[:_NAME_BYTES], gathered[_NAME_BYTES:]))
    return _mismatch(DIFFERENT_NAMES.format(place=place, one=ranks[pair[0]], first=first, other=ranks[pair[1]],
                                            second=second))


def _mismatch(sentence: str) -> HorovodInternalError:
    error = HorovodInternalError(sentence)
    error.status = native.ERR_MISMATCH
    return error


def _different_variables(name: str, group: ProcessSet, members: Sequence[Member]) -> HorovodInternalError:
    """The error for different variables, with the number of gradients on the ranks; collective."""
    mine = [len(members) if rank == group.rank() else 0 for rank in range(group.size())]
    counts = [largest for largest, _ in extremes(mine, f"{name}.counts", group)]
    known = [(count, rank) for count, rank in zip(counts, group.ranks or (), strict=True) if count > 0]
    (fewest, one), (most, other) = min(known), max(known)
    return _mismatch(DIFFERENT_VARIABLES.format(
        counts=f"{most} on each" if fewest == most else f"{fewest} on rank {one} and {most} on rank {other}",
        names=listed([member.name for member in members]),
    ))


# ----------------------------------------------------------------------------------------------------- numbers ----

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


def _others(optimizers: Sequence[Any]) -> list[Any]:
    known = set(map(id, optimizers))
    return [reducer for reducer in reducers if id(reducer) not in known]


def _key(reducer: Any) -> Any:
    return reducer.group.process_set_id, reducer.key


def _shared(reducer: Any) -> Any:
    """The numbers that rank 0 had for Reducers with this key in share_numbers(), and that none has taken since."""
    return (runtime.shared_numbers or {}).get(_key(reducer), [])
