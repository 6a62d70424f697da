"""A sampler that continues within an epoch after the number of ranks has changed."""
from collections.abc import Sized
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler

from bagua_hvd.job import basics


class ElasticSampler(DistributedSampler):
    """Iterates over this rank's share of the rest of the epoch.

    All ranks use the same order: 0, 1, 2, ..., or a permutation from seed and epoch. The first `processed_num` entries
    are done. The rest is padded with its own first entries so that every rank gets the same number, and rank r of n
    takes entries r, r + n, r + 2 n, ...

    Usage: record_batch() after every batch, state.commit() now and then, set_epoch() at the *end* of an epoch.

    Args:
        dataset: anything with a length.
        shuffle: a new permutation for every epoch.
        seed: the same on all ranks.
    Raises:
        ValueError: before init().
    Attributes:
        epoch; processed_num: entries of this epoch done by all ranks together; num_replicas, rank: size and rank of the
        job at the last reset(); num_samples: length of an iteration; remaining_indices: entries left, of all ranks.
    """

    drop_last = False

    # Nothing of the base remains but its type, by which Lightning sees that ranks' shares differ already. Its __init__
    # would need torch.distributed.
    def __init__(self, dataset: Dataset[Any] | Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, with nothing processed. Call it after the last batch of the previous epoch, so that a state
        committed between the two does not begin with the old count."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Counts a batch that every rank has processed. The indices change at the next reset().

        Args:
            batch_idx: unused, for compatibility with Horovod. batch_size: of this rank; assumed equal on the others.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """{"epoch": ..., "processed_num": ...}, the same on all ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state_dict() and distributes the remaining entries."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distributes the rest of the epoch among the current ranks."""
        self.num_replicas = basics.size()
        self.rank = basics.rank()
        self.remaining_indices = self._order()[self.processed_num:]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def _order(self):
        count = len(self.dataset)
        if not self.shuffle:
            return list(range(count))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(count, generator=generator).tolist()

    def __iter__(self):
        remaining = self.remaining_indices
        # Modulo: there may be fewer entries left than ranks.
        return iter([remaining[i % len(remaining)] for i in range(self.rank, self.total_size, self.num_replicas)])

    def __len__(self):
        return self.num_samples
