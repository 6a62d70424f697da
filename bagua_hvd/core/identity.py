"""A dict for keys that cannot be hashed, or that compare element by element, as variables and tensors do."""
import weakref
from typing import Any


class ByIdentity:
    """A dict that compares its keys by identity. An entry is removed when its key dies.

    Keys are held by weak references. A new object at a dead one's address, with the same id(), is another key.

    Args:
        of: function that maps a given key to the object whose identity counts.
    """

    def __init__(self, of: Any = lambda key: key) -> None:
        self._of = of
        # id -> (weak reference, value); an entry is removed before its id can be reused
        self._entries: dict[int, Any] = {}

    def __setitem__(self, key, value):
        target, entries = self._of(key), self._entries
        number = id(target)
        entries[number] = weakref.ref(target, lambda _: entries.pop(number, None)), value

    def __getitem__(self, key):
        return self._entries[id(self._of(key))][1]

    def __contains__(self, key):
        return bool(self._entries) and id(self._of(key)) in self._entries

    def __len__(self):
        return len(self._entries)

    def add(self, key: Any) -> None:
        """Adds an entry without a value, to use this as a set."""
        self[key] = None

    def values(self) -> list:
        """The values of all entries."""
        return [value for _, value in self._entries.values()]
