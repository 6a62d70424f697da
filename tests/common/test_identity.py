import gc

import pytest

from bagua_hvd.core.identity import ByIdentity


class Unhashable:
    """Equal to everything, as a tensor of one element may be."""

    def __init__(self, value=None):
        self.value = value

    def __eq__(self, other):
        return True

    __hash__ = None


def test_keys_are_objects():
    one, other = Unhashable(), Unhashable()
    kept = ByIdentity()
    assert one not in kept
    kept[one] = 1
    kept[one] = 2
    assert one in kept and other not in kept and kept[one] == 2 and len(kept) == 1 and kept.values() == [2]
    with pytest.raises(KeyError):
        kept[other]


def test_entries_end_with_their_objects():
    kept = ByIdentity()
    one, other = Unhashable(), Unhashable()
    kept[one] = 1
    kept[one] = 2
    kept[other] = 3
    del one
    assert kept.values() == [3]
    # Part of a cycle.
    other.value = other
    del other
    gc.collect()
    assert len(kept) == 0


def test_another_object_where_one_lay():
    kept = ByIdentity()
    for _ in range(1000):       # mostly the first attempt succeeds
        one = Unhashable()
        kept[one] = 1
        number = id(one)
        del one
        another = Unhashable()
        if id(another) == number:
            break
    assert id(another) == number and another not in kept


def test_what_is_meant():
    inside = Unhashable()
    kept = ByIdentity(lambda key: key.value)
    kept.add(Unhashable(inside))
    assert Unhashable(inside) in kept and len(kept) == 1
