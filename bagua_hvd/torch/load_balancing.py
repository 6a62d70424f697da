"""Samplers for data whose samples cost unequally much: in every step the ranks' shares cost about the same.

A step of synchronous training takes as long as its slowest rank. Here samples are sorted by cost and cut into chunks of
n neighbours, one sample for each of n ranks; what is shuffled is the order of the chunks.

    c[i] = complexity(i) + u[i] * random_level * (max - min)        u[i] uniform in [0, 1), new in each epoch
    chunk k = those whose places in the order of c are k n ... k n + n - 1

All ranks compute the same chunks, from seed and epoch: nothing is communicated.
Source: the sampler of BAGUA (bagua.torch_api.contrib).  Differs: the noise is a real number, so that complexities may
be fractions; what is repeated or dropped to fill the last chunk changes from epoch to epoch; the costliest of a chunk
is not always the last rank's; batches may be bounded by cost, for all ranks at once.
"""
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from bagua_hvd.job import basics


def _number(cost, sample):
    try:
        return float(cost.item() if hasattr(cost, "item") else cost)        # of a tensor, too
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"complexity_fn gives {cost!r} for sample {sample}; it must give a number") from None


class LoadBalancingDistributedSampler(Sampler[int]):
    """This rank's share of the epoch; the k-th samples of all ranks cost about the same.

    Every sample is some rank's once in an epoch. Where ranks do not divide the samples, a few at random, fewer than
    there are ranks, come twice, or are left out with `drop_last`.

    Call set_epoch() before each epoch. As attribute of a TorchState it goes on within an epoch when the number of ranks
    has changed: record_batch() after every batch, set_epoch() at the *end* of an epoch, as with an ElasticSampler. That
    counts samples in the order of iteration; it does not fit a batch sampler, which takes them in another.

    Args:
        dataset: anything with a length, and with samples that complexity_fn takes.
        complexity_fn: sample -> its cost, a finite number in any unit, such as its length. Called for every sample, on
            every rank, once: reads the whole data set.
        num_replicas, rank: default: size and rank of the job, asked for anew by reset().
        shuffle: chunks in an order of their own in each epoch; otherwise in that of rising cost, without noise.
        seed: the same on all ranks.
        drop_last: leave out what fills no chunk, rather than repeat samples.
        random_level: from 0, neighbours by cost, which differ between epochs only among samples of equal cost, to 1,
            noise as large as the costs' range. More noise mixes better and balances less.
        complexities: the costs, one for each sample, in place of complexity_fn: no sample is read.
    Raises:
        ValueError: complexity_fn and complexities both or neither, another number of costs than samples, a cost that is
            not finite, random_level not in [0, 1], rank not below num_replicas, no job and no num_replicas.
    Attributes:
        epoch; num_replicas, rank: at the last reset(); complexities: float64, shape (len(dataset),);
        chunks: int64, shape (len(self), num_replicas), indices by rising cost, column r of rank r.
    """

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
        self.shuffle, self.seed, self.drop_last, self.random_level = shuffle, seed, drop_last, random_level
        self._given = num_replicas, rank
        self.epoch = 0
        # (ranks, samples that they did together) of this epoch before the last reset(); and since then, of each rank.
        self._done: list[tuple[int, int]] = []
        self._here = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: nothing of it is done."""
        self.epoch = epoch
        self._done, self._here = [], 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Counts a batch that every rank has done; takes effect with the next reset().

        Args:
            batch_idx: as ElasticSampler's. batch_size: of this rank; the others' are taken to be the same.
        """
        self._here += batch_size

    def state_dict(self) -> dict[str, Any]:
        """{"epoch": ..., "done": ...}, the same on all ranks."""
        return {"epoch": self.epoch, "done": self._all_done()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up a state_dict() and shares out what is left."""
        self.epoch = state_dict["epoch"]
        self._done, self._here = list(state_dict["done"]), 0
        self.reset()

    def _all_done(self):
        return self._done + ([(self.num_replicas, self._here * self.num_replicas)] if self._here else [])

    def reset(self) -> None:
        """Shares out what is left of the epoch among the ranks that there are now."""
        self._done, self._here = self._all_done(), 0
        n, rank = self._given
        self.num_replicas = basics.size() if n is None else n
        self.rank = basics.rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank is {self.rank} of {self.num_replicas} ranks; it must be from 0 to one less")
        left = np.arange(len(self.complexities))
        # Chunks depend on the number of ranks: what is done is found by sharing out again as it was then.
        for ranks, count in self._done:
            chunks, order = self._cut(left, ranks)
            left = np.setdiff1d(left, chunks[order].ravel()[:count])
        self.chunks, self._order = self._cut(left, self.num_replicas)

    def _cut(self, left, n):
        """The chunks of the samples `left`, by rising cost; and the order in which their rows are taken."""
        generator = np.random.default_rng((self.seed, self.epoch))
        cost = self.complexities[left]
        if self.shuffle:
            # First shuffled, then sorted by a stable sort: samples of equal cost meet others in each epoch.
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
            else:       # beside itself, so that its chunk is one of neighbours, too
                left = left[np.sort(np.append(np.arange(len(left)), np.resize(choice, n - excess)))]
        rows = np.arange(len(left) // n)
        # Rotated, so that each rank has the costliest of a chunk in turn.
        chunks = left.reshape(-1, n)[rows[:, None], (np.arange(n) + rows[:, None]) % n]
        return chunks, generator.permutation(len(rows)) if self.shuffle else rows

    def __iter__(self) -> Iterator[int]:
        return iter(self.chunks[self._order, self.rank].tolist())

    def __len__(self) -> int:
        return len(self.chunks)


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Batches of a LoadBalancingDistributedSampler's samples, equally many on all ranks: by cost, or by your function.

    With `max_cost` a batch has as many samples, neighbours by cost, as stay within the bound: many cheap ones or a few
    costly ones. So all steps, and all ranks in a step, take about as long, and little is padded. Batches have the same
    number of samples on all ranks; the mean over ranks is the mean over their samples. A sample beyond the bound is a
    batch by itself.

    With `batch_fn` each rank's indices are cut by that function. Ranks with fewer batches repeat their first ones.

        sampler = LoadBalancingDistributedSampler(dataset, len)
        batches = LoadBalancingDistributedBatchSampler(sampler, max_cost=4000, cost=lambda c: len(c) * c[-1])   # padded
        loader = DataLoader(dataset, batch_sampler=batches)

    Args:
        sampler: its shuffle, seed and epoch are those of the batches.
        batch_fn: list of indices -> list of batches, which are lists of indices; the same on all ranks for the same
            indices. Called for every rank's.
        drop_last: with batch_fn: leave out batches that not all ranks have, rather than repeat some.
        max_cost: bound of a batch, in the unit of `cost`.
        cost: complexities of a batch, a rising float64 array, -> the batch's cost. It must not fall when a sample is
            added or becomes costlier. Default: their sum.
    Raises:
        ValueError: batch_fn and max_cost both or neither, drop_last with max_cost; when iterating, a rank with no batch
            beside one that has some.
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
        self._chunks: Any = None        # what the batches were made of
        self._batches: list[list[int]] = []

    def set_epoch(self, epoch: int) -> None:
        """The sampler's."""
        self.sampler.set_epoch(epoch)

    def batches(self) -> list[list[int]]:
        """This rank's batches of the sampler's epoch."""
        if self._chunks is not self.sampler.chunks:     # made anew by every reset()
            self._batches = self._of_function() if self.max_cost is None else self._bounded(self.max_cost)
            self._chunks = self.sampler.chunks
        return self._batches

    def _bounded(self, max_cost):
        chunks = self.sampler.chunks
        # Of the costliest in each chunk: no rank's batch costs more.
        worst = self.sampler.complexities[chunks].max(axis=1)
        starts = [0] if len(chunks) else []
        for end in range(1, len(chunks)):
            if self.cost(np.sort(worst[starts[-1]:end + 1])) > max_cost:       # noise may have mixed them
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
