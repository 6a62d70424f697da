"""Samplers for data with unequal costs per sample: in every step all ranks' shares cost about the same.

A step of synchronous training takes as long as its slowest rank. So samples are sorted by cost and cut into chunks of
n neighbours, one sample for each of n ranks, and the chunks are shuffled.

    c[i] = complexity(i) + u[i] * random_level * (max - min)        u[i] uniform in [0, 1), new in each epoch
    chunk k = samples k n ... k n + n - 1 in the order of c

All ranks compute the same chunks from seed and epoch, without communication.
Source: the sampler of BAGUA (bagua.torch_api.contrib).  Differs: the noise is a real number, so that complexities may
be fractions; the samples repeated or dropped to fill the last chunk change from epoch to epoch; the costliest of a
chunk is not always the last rank's; batches may be bounded by cost, for all ranks at once.
"""
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler, Sampler

from bagua_hvd.job import basics


def _number(cost, sample):
    try:
        return float(cost.item() if hasattr(cost, "item") else cost)        # may be a tensor
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"complexity_fn gives {cost!r} for sample {sample}; it must give a number") from None


class LoadBalancingDistributedSampler(DistributedSampler[int]):
    """Iterates over this rank's share of the epoch; the k-th samples of all ranks cost about the same.

    An epoch has every sample once, on some rank. If the number of ranks does not divide the number of samples, a few
    random samples, fewer than there are ranks, are repeated, or left out with `drop_last`.

    Call set_epoch() before each epoch. As an attribute of a TorchState it continues within an epoch after the number of
    ranks has changed: call record_batch() after every batch, and set_epoch() at the *end* of an epoch, as with an
    ElasticSampler. Samples count in iteration order, so this does not work with a batch sampler, which reorders them.

    Args:
        dataset: anything with a length, and with samples that complexity_fn accepts.
        complexity_fn: sample -> its cost, a finite number in any unit, such as its length. Called once for every
            sample, on every rank, so it reads the whole data set.
        num_replicas, rank: default: size and rank of the job, read again by reset().
        shuffle: a new order of chunks in each epoch; otherwise by rising cost, without noise.
        seed: the same on all ranks.
        drop_last: leave out samples that do not fill a chunk, instead of repeating some.
        random_level: noise, relative to the range of the costs, from 0 (chunks differ between epochs only by samples of
            equal cost) to 1. More noise mixes better and balances less.
        complexities: the costs, one for each sample, instead of complexity_fn: no sample is read.
    Raises:
        ValueError: both or neither of complexity_fn and complexities, another number of costs than samples, a cost
            that is not finite, random_level not in [0, 1], rank not below num_replicas, no job and no num_replicas.
    Attributes:
        epoch; num_replicas, rank: at the last reset(); complexities: float64, shape (len(dataset),);
        chunks: int64, shape (len(self), num_replicas), indices by rising cost, column r of rank r.
    """

    # Only the base's type remains: see ElasticSampler.
    def __init__(self, dataset: Any, complexity_fn: Callable[[Any], float] | None = None,
                 num_replicas: int | None = None, rank: int | None = None, shuffle: bool = True, seed: int = 0,
                 drop_last: bool = False, random_level: float = 0.0, *,
                 complexities: Sequence[float] | None = None) -> None:
        if (complexity_fn is None) == (complexities is None):
            raise ValueError("give either complexity_fn, a function of a sample, or complexities, one for each sample")
        if not 0 <= random_level <= 1:
            raise ValueError(f"random_level is {random_level}; it must be in [0, 1]")
        if complexity_fn is not None:
            complexities = [_number(complexity_fn(dataset[i]), i) for i in range(len(dataset))]
        self.complexities: np.ndarray = np.asarray(complexities, np.float64)
        if self.complexities.shape != (len(dataset),):
            raise ValueError(f"complexities have the shape {self.complexities.shape} for {len(dataset)} samples; "
                             "give one number for each")
        if not np.isfinite(self.complexities).all():
            worst = int(np.argmin(np.isfinite(self.complexities)))
            raise ValueError(f"the complexity of sample {worst} is {self.complexities[worst]}; it must be finite")
        self.dataset = dataset
        self.shuffle, self.seed, self.drop_last, self.random_level = shuffle, seed, drop_last, random_level
        self._given = num_replicas, rank
        self.epoch = 0
        # (ranks, samples that they processed together) in this epoch before the last reset(); and per rank since then.
        self._done: list[tuple[int, int]] = []
        self._here = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, with nothing processed."""
        self.epoch = epoch
        self._done, self._here = [], 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Counts a batch that every rank has processed; takes effect at the next reset().

        Args:
            batch_idx: as ElasticSampler's. batch_size: of this rank; assumed equal on the others.
        """
        self._here += batch_size

    def state_dict(self) -> dict[str, Any]:
        """{"epoch": ..., "done": ...}, the same on all ranks."""
        return {"epoch": self.epoch, "done": self._all_done()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state_dict() and distributes the remaining samples."""
        self.epoch = state_dict["epoch"]
        self._done, self._here = list(state_dict["done"]), 0
        self.reset()

    def _all_done(self):
        return self._done + ([(self.num_replicas, self._here * self.num_replicas)] if self._here else [])

    def reset(self) -> None:
        """Distributes the rest of the epoch among the current ranks."""
        self._done, self._here = self._all_done(), 0
        n, rank = self._given
        self.num_replicas = basics.size() if n is None else n
        self.rank = basics.rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank is {self.rank} of {self.num_replicas} ranks; it must be from 0 to one less")
        left = np.arange(len(self.complexities))
        # Chunks depend on the number of ranks: repeating the earlier distributions finds the processed samples.
        for ranks, count in self._done:
            chunks, order = self._cut(left, ranks)
            left = np.setdiff1d(left, chunks[order].ravel()[:count])
        self.chunks, self._order = self._cut(left, self.num_replicas)
        self.num_samples, self.total_size = len(self.chunks), self.chunks.size

    def _cut(self, left, n):
        """The chunks of the samples `left`, by rising cost; and the order of their rows."""
        generator = np.random.default_rng((self.seed, self.epoch))
        cost = self.complexities[left]
        if self.shuffle:
            # Shuffle, then a stable sort: samples of equal cost get new neighbours in each epoch.
            left = generator.permutation(left)
            cost = self.complexities[left]
            if len(left):
                cost = cost + generator.random(len(left)) * self.random_level * np.ptp(cost)
        left = left[np.argsort(cost, kind="stable")]
        excess = len(left) % n
        if excess:
            choice = generator.permutation(len(left)) if self.shuffle else np.arange(len(left))[::-1]
            if self.drop_last:
                left = np.delete(left, choice[:excess])
            else:       # next to itself, so that its chunk, too, consists of neighbours
                left = left[np.sort(np.append(np.arange(len(left)), np.resize(choice, n - excess)))]
        rows = np.arange(len(left) // n)
        # Rotated, so that the costliest of a chunk goes to each rank in turn.
        chunks = left.reshape(-1, n)[rows[:, None], (np.arange(n) + rows[:, None]) % n]
        return chunks, generator.permutation(len(rows)) if self.shuffle else rows

    def __iter__(self) -> Iterator[int]:
        return iter(self.chunks[self._order, self.rank].tolist())

    def __len__(self) -> int:
        return len(self.chunks)


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Batches of a LoadBalancingDistributedSampler's samples, the same number on all ranks: by cost or by a function.

    With `max_cost` a batch takes as many samples of similar cost as the bound allows: many cheap ones or a few costly
    ones. So all steps, and all ranks in a step, take about the same time, with little padding. All ranks' batches of a
    step have the same number of samples, so the mean over ranks is the mean over samples. A sample beyond the bound is
    a batch by itself.

    With `batch_fn` that function cuts each rank's indices. Ranks with fewer batches repeat their first ones.

        sampler = LoadBalancingDistributedSampler(dataset, len)
        batches = LoadBalancingDistributedBatchSampler(sampler, max_cost=4000, cost=lambda c: len(c) * c[-1])   # padded
        loader = DataLoader(dataset, batch_sampler=batches)

    Args:
        sampler: gives the batches their shuffle, seed and epoch.
        batch_fn: list of indices -> list of batches, which are lists of indices; the same result on all ranks for the
            same indices. Called for the indices of every rank.
        drop_last: with batch_fn: leave out batches that not all ranks have, instead of repeating some.
        max_cost: upper bound of a batch's cost, in the unit of `cost`.
        cost: complexities of a batch, a rising float64 array, -> the batch's cost. It must not fall when a sample is
            added or becomes costlier. Default: their sum.
    Raises:
        ValueError: both or neither of batch_fn and max_cost, drop_last with max_cost; when iterating: one rank has no
            batch, and another has some.
    """

    def __init__(self, sampler: LoadBalancingDistributedSampler,
                 batch_fn: Callable[[list[int]], list[list[int]]] | None = None, drop_last: bool = False, *,
                 max_cost: float | None = None, cost: Callable[[Any], float] = np.sum) -> None:
        if (batch_fn is None) == (max_cost is None):
            raise ValueError("give either batch_fn, which cuts indices into batches, or max_cost, the bound of a batch")
        if drop_last and max_cost is not None:
            raise ValueError("drop_last is for batch_fn: with max_cost all ranks have equally many batches")
        self.sampler, self.drop_last, self.max_cost, self.cost = sampler, drop_last, max_cost, cost
        self.batch_fn: Any = batch_fn
        self._chunks: Any = None        # the chunks that the batches were made of
        self._batches: list[list[int]] = []

    def set_epoch(self, epoch: int) -> None:
        """Calls the sampler's set_epoch()."""
        self.sampler.set_epoch(epoch)

    def batches(self) -> list[list[int]]:
        """This rank's batches of the sampler's epoch."""
        if self._chunks is not self.sampler.chunks:     # every reset() makes new ones
            self._batches = self._of_function() if self.max_cost is None else self._bounded(self.max_cost)
            self._chunks = self.sampler.chunks
        return self._batches

    def _bounded(self, max_cost):
        chunks = self.sampler.chunks
        # Costs of the costliest sample in each chunk: no rank's batch costs more.
        worst = self.sampler.complexities[chunks].max(axis=1)
        starts = [0] if len(chunks) else []
        for end in range(1, len(chunks)):
            if self.cost(np.sort(worst[starts[-1]:end + 1])) > max_cost:       # noise may have changed the order
                starts.append(end)
        parts = np.split(chunks[:, self.sampler.rank], starts[1:]) if starts else []
        generator = np.random.default_rng((self.sampler.seed, self.sampler.epoch))
        order = generator.permutation(len(parts)) if self.sampler.shuffle else range(len(parts))
        return [parts[i].tolist() for i in order]

    def _of_function(self):
        indices = self.sampler.chunks[self.sampler._order].T.tolist()       # of all ranks
        every = [self.batch_fn(mine) for mine in indices]
        counts = [len(batches) for batches in every]
        if min(counts) == 0 < max(counts) and not self.drop_last:
            raise ValueError(f"batch_fn made no batch of the {len(indices[0])} samples of rank {counts.index(0)}, and "
                             f"{max(counts)} of another's; let it make one at least, or set drop_last")
        mine = every[self.sampler.rank]
        return [mine[i % len(mine)] for i in range(min(counts) if self.drop_last else max(counts))]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches())

    def __len__(self) -> int:
        return len(self.batches())
