"""A data set that loads samples once and caches them, in shared memory or on a disk, by diskcache."""
import hashlib
import io
import logging
import os
import pickle
import re
import stat
import sys
from typing import Any

import numpy as np

_log = logging.getLogger("bagua_hvd")
_MISSING = object()
_IDENTITY = "identity"          # key for the data set without a name; keys of samples have a colon
_UNNAMED = re.compile("|[0-9a-f]{64}")      # before the colon, for data sets without a name; empty in earlier versions


class _Digested(pickle.Pickler):
    """Pickles equal arrays and tensors to equal bytes, which pickle alone does not guarantee."""

    def reducer_override(self, value):
        if not hasattr(type(value), "__array__"):
            return NotImplemented
        array = np.asarray(value)
        return bytes, (array.tobytes() if array.dtype != object else array.tolist(), str(array.dtype), array.shape)


class _Compact(pickle.Pickler):
    """Pickles only a tensor's own part of larger memory: otherwise torch stores all of the memory."""

    def reducer_override(self, value):
        torch = sys.modules.get("torch")
        if (torch is not None and isinstance(value, torch.Tensor) and value.layout is torch.strided
                and value.untyped_storage().nbytes() > value.nbytes):
            return value.clone().__reduce_ex__(4)
        return NotImplemented


def _pickled(pickler, sample):
    file = io.BytesIO()
    pickler(file, 4).dump(sample)
    return file.getvalue()


def _digest(sample):
    """A digest of the sample; None if it cannot be pickled, or its arrays are not in this host's memory."""
    try:
        return hashlib.sha256(_pickled(_Digested, sample)).hexdigest()
    except Exception:
        return None


class CachedDataset:
    """A map-style data set that caches loaded samples, for all processes of a host and for later runs.

        dataset = CachedDataset(dataset, "/dev/shm/digits", size_limit=8 << 30)     # in memory
        dataset = CachedDataset(dataset, "/scratch/digits", size_limit=500 << 30)   # on a disk

    Sample i is the data set's first result for i, by pickle; so apply random augmentation around the cached data set.
    Entries are found by `dataset_name` and i alone; other data, or data that has changed, needs another name or an
    empty folder. Without a name, the folder is for one data set: each time, its class, length and first sample are
    compared. Entries are then found by these and i, so no other data gets them, even if the identity was evicted.
    Samples that cannot be stored, or do not fit, are loaded each time, with one warning.

    Unpickling can run code: whoever can write the folder can run code here. The folder is created for its owner only;
    one that others may write is refused.

    Args:
        dataset: anything with len() and [i]; torch's DataLoader takes either.
        folder: of the cache; created if necessary. A network file system is slow and unsafe (SQLite's locks).
        dataset_name: distinguishes this data from other data in the same folder.
        size_limit: bytes, for all data sets in the folder.
        eviction_policy: when the limit is reached, "none" keeps the entries and loads the rest each time; others are
            diskcache's "least-recently-stored", "-used", "least-frequently-used". With a new random order in each epoch
            "none" hits most: the others evict samples that the next epoch reads.
    Raises:
        ImportError: diskcache is not installed. PermissionError: others may write the folder. ValueError: an unknown
            policy; or no dataset_name, and the folder holds samples of other data.
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
        self._warned = False
        self._prefix = dataset_name or self._claim()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        index = int(index)      # integers of NumPy and torch would be other keys
        key = f"{self._prefix}:{index}"
        sample = self._tried(lambda: self.cache.get(key, _MISSING))
        if sample is _MISSING:
            sample = self.dataset[index]
            self._tried(lambda: self._store(key, sample))
        return sample

    def _claim(self):
        """Claims the folder for the data set without a name. Returns the prefix of its keys.

        The entry that is compared may be evicted or cleared; the keys still tell data sets apart.
        """
        kind, count = type(self.dataset), len(self.dataset)
        identity = f"{kind.__module__}.{kind.__qualname__}", count, _digest(self.dataset[0]) if count else None
        prefix = hashlib.sha256(repr(identity).encode()).hexdigest()
        if self._tried(lambda: self.cache.add(_IDENTITY, identity)) is True:
            self._tried(lambda: self._remove_others(prefix))
        found = self._tried(lambda: self.cache.get(_IDENTITY, identity))
        if found not in (identity, _MISSING):
            raise ValueError(
                f"the folder {self.cache.directory!r} holds samples of another data set, or of data that has changed "
                f"since ({found[0]}, {found[1]} samples; this one: {identity[0]}, {identity[1]} samples): give each "
                "data set a dataset_name, or an empty folder")
        return prefix

    def _remove_others(self, prefix):
        """Removes samples of other data sets without a name, which had the folder before: nothing finds them again."""
        for key in list(self.cache):
            of, colon, _ = str(key).rpartition(":")
            if colon and of != prefix and _UNNAMED.fullmatch(of):
                self.cache.delete(key)

    def _store(self, key, sample):
        if self.cache.eviction_policy != "none" or self.cache.volume() < self.cache.size_limit:
            self.cache.set(key, pickle.loads(_pickled(_Compact, sample)))
        else:
            self._warn(f"is full: it has {len(self.cache)} entries, and size_limit is {self.cache.size_limit} bytes: "
                       "other samples are loaded each time")

    def _warn(self, what):
        if not self._warned:
            self._warned = True
            _log.warning("CachedDataset: the cache in %r %s", self.cache.directory, what)

    def _tried(self, function):
        """The function's result; _MISSING if it failed, because of the cache or of pickle."""
        try:
            return function()
        except Exception as error:
            self._warn(f"has failed, samples are loaded: {type(error).__name__}: {error}")
            return _MISSING
