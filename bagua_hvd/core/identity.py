"""A dict of objects that cannot be hashed, or are equal element by element, as variables and tensors are."""
import weakref
from typing import Any


class ByIdentity:
    """A dict whose keys are objects, by what they are and not by what they equal; an entry ends with its object.

    So it keeps none alive, and an object that lies where another one lay, whose id() is the same, is another key.

    Args:
        of: function of what is given as a key, that returns the object which is meant.
    """

    def __init__(self, of: Any = lambda key: key) -> None:
        self._of = of
        # id -> (weak reference, value); without an entry before the id is another object's
        self._entries: dict[int, Any] = {}

    def __setitem__(self, key, value):
        meant, entries = self._of(key), self._entries
        number = id(meant)
        entries[number] = weakref.ref(meant, lambda _: entries.pop(number, None)), value

    def __getitem__(self, key):
        return self._entries[id(self._of(key))][1]

    def __contains__(self, key):
        return bool(self._entries) and id(self._of(key)) in self._entries

    def __len__(self):
        return len(self._entries)

    def add(self, key: Any) -> None:
        """For a set: an entry without a value."""
        self[key] = None

    def values(self) -> list:
        """Those of all entries."""
        return [value for _, value in self._entries.values()]
