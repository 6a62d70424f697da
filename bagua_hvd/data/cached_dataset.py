"""A data set whose samples are loaded once and kept, in shared memory or on a disk; the cache is diskcache's."""
import logging
import os
import sqlite3
import stat
from typing import Any

_log = logging.getLogger("bagua_hvd")
_MISSING = object()


class CachedDataset:
    """A map-style data set that keeps what it has loaded, for all processes of a host and for later runs.

        dataset = CachedDataset(dataset, "/dev/shm/digits", size_limit=8 << 30)     # in memory
        dataset = CachedDataset(dataset, "/scratch/digits", size_limit=500 << 30)   # on a disk

    Sample i is what the data set gave for i the first time, by pickle: random augmentation belongs outside, around the
    cached data set. Entries are found by `dataset_name` and i alone; other data, or data that has changed, needs
    another name or an empty folder. What cannot be stored is loaded each time, with one warning.

    Pickle runs what it reads: whoever can write the folder can run code here. It is made for its owner only; one that
    others may write is refused.

    Args:
        dataset: anything with len() and [i]; torch's DataLoader takes either. Samples must be picklable.
        folder: of the cache; made if there is none. One on a network is slow and unsafe (SQLite's locks).
        dataset_name: apart from other data sets in the same folder.
        size_limit: bytes, of all data sets in the folder.
        eviction_policy: when that is reached, "none": what is there stays, the rest is loaded each time; or diskcache's
            "least-recently-stored", "-used", "least-frequently-used". With a new random order in each epoch "none" hits
            most: the others throw away what the next epoch reads.
    Raises:
        ImportError: there is no diskcache. PermissionError: others may write the folder. ValueError: an unknown policy.
    Attributes:
        dataset; cache: the diskcache.Cache, for clear(), volume(), len().
    """

    def __init__(self, dataset: Any, folder: str | os.PathLike[str], dataset_name: str = "", size_limit: int = 1 << 30,
                 eviction_policy: str = "none") -> None:
        try:
            import diskcache
        except ModuleNotFoundError:
            raise ImportError("CachedDataset needs diskcache: pip install 'bagua_hvd[cache]'") from None
        if eviction_policy not in diskcache.EVICTION_POLICY:
            raise ValueError(f"eviction_policy is {eviction_policy!r}; it must be one of "
                             f"{', '.join(map(repr, diskcache.EVICTION_POLICY))}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.stat(folder)
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{os.fspath(folder)!r} can be written by others, who could run code here; name a "
                                  "folder of your own, with the permissions 0700")
        self.dataset, self.dataset_name = dataset, dataset_name
        self.cache = diskcache.Cache(os.fspath(folder), size_limit=size_limit, eviction_policy=eviction_policy)
        self._failures: tuple[type[Exception], ...] = (OSError, sqlite3.Error, diskcache.Timeout)
        self._warned = False

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        index = int(index)      # NumPy's integers and torch's are other keys
        key = f"{self.dataset_name}:{index}"
        sample = self._tried(self.cache.get, key, _MISSING)
        if sample is _MISSING:
            sample = self.dataset[index]
            self._tried(self._store, key, sample)
        return sample

    def _store(self, key, sample):
        if self.cache.eviction_policy != "none" or self.cache.volume() < self.cache.size_limit:
            self.cache.set(key, sample)

    def _tried(self, function, key, value):
        """What the function returns; _MISSING: the cache has failed."""
        try:
            return function(key, value)
        except self._failures as error:
            if not self._warned:
                self._warned = True
                _log.warning("CachedDataset: the cache in %r has failed, samples are loaded: %s: %s",
                             self.cache.directory, type(error).__name__, error)
            return _MISSING
