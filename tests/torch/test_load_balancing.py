"""Samplers by cost: each sample once, chunks of similar costs, equal on all ranks, and continuing after a resize."""
import itertools

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd.torch.elastic.state import SamplerStateHandler

Sampler, BatchSampler = hvd.LoadBalancingDistributedSampler, hvd.LoadBalancingDistributedBatchSampler
SIZES = [(1, 1), (10, 1), (10, 2), (11, 2), (10, 3), (11, 3), (2, 5), (1, 4), (0, 3), (97, 8)]


def costs(count, seed=0):
    """Skewed: many cheap samples, few expensive ones; some are equal."""
    return np.ceil(np.random.default_rng(seed).lognormal(3, 1.2, count)).tolist()


def samplers(count, n, epoch=0, **options):
    """One sampler per rank."""
    made = [Sampler(range(count), num_replicas=n, rank=rank, complexities=costs(count), **options) for rank in range(n)]
    for sampler in made:
        sampler.set_epoch(epoch)
    return made


def steps(made):
    """Row k: the samples of step k, one per rank."""
    return list(zip(*made, strict=True))


@pytest.mark.parametrize("count, n", SIZES)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("random_level", [0, 0.3])
def test_every_sample_once(count, n, shuffle, random_level):
    made = samplers(count, n, shuffle=shuffle, random_level=random_level)
    taken = sorted(itertools.chain(*made))
    assert {len(sampler) for sampler in made} == {-(-count // n)} == {len(list(sampler)) for sampler in made}
    if count >= n:
        assert set(taken) == set(range(count)) and len(taken) - count < n
        assert max((taken.count(i) for i in taken), default=0) <= 2
    dropped = samplers(count, n, shuffle=shuffle, random_level=random_level, drop_last=True)
    taken = list(itertools.chain(*dropped))
    assert {len(sampler) for sampler in dropped} == {count // n}
    assert len(set(taken)) == len(taken) == count // n * n


@pytest.mark.parametrize("count, n", [(97, 8), (60, 3), (11, 2)])
def test_ranks_cost_alike_in_every_step(count, n):
    """The samples of a step have neighbouring costs; the spread within a step is that of the definition."""
    made = samplers(count, n)
    cost = np.array(costs(count))
    rows = cost[np.array(steps(made))]
    # Sorted by cost, rows do not overlap: the maximum of a row does not exceed the minimum of the next one.
    rows = rows[np.argsort(rows.min(axis=1) + rows.max(axis=1), kind="stable")]
    assert (rows[:-1].max(axis=1) <= rows[1:].min(axis=1)).all()
    if count % n == 0:
        assert np.array_equal(np.sort(rows, axis=1), np.sort(cost).reshape(-1, n))
    # No rank has the most expensive sample of every row.
    differ = np.ptp(rows, axis=1) > 0
    assert len(set(rows[differ].argmax(axis=1))) == n


def test_order_is_by_seed_and_epoch_only():
    first, same = samplers(60, 3), samplers(60, 3)
    assert steps(first) == steps(same) == steps(samplers(60, 3))
    assert steps(first) != steps(samplers(60, 3, seed=1))
    assert steps(first) != steps(samplers(60, 3, epoch=1))
    # Without noise epochs differ only in the order of steps; with noise, in the samples of a step, too.
    distinct = [Sampler(range(60), complexities=range(60), num_replicas=3, rank=rank) for rank in range(3)]
    rows = set(map(frozenset, steps(distinct)))
    for sampler in distinct:
        sampler.set_epoch(5)
    assert set(map(frozenset, steps(distinct))) == rows
    noisy = [set(map(frozenset, steps(samplers(60, 3, epoch=epoch, random_level=0.2)))) for epoch in (0, 1)]
    assert noisy[0] != noisy[1]


def test_without_shuffle_costs_rise_and_epochs_are_equal():
    made = samplers(61, 2, shuffle=False, random_level=1)
    rows = np.array(costs(61))[np.array(steps(made))]
    assert (np.diff(np.sort(rows, axis=1).ravel()) >= 0).all()
    assert steps(made) == steps(samplers(61, 2, epoch=3, shuffle=False))


def test_other_samples_are_dropped_in_other_epochs():
    left_out = set()
    for epoch in range(8):
        left_out |= set(range(11)) - set(itertools.chain(*samplers(11, 3, epoch=epoch, drop_last=True)))
    assert len(left_out) > 2


def test_function_of_a_sample_is_called_once_for_each():
    words, seen = ["a", "bbb", "cc", "dddd"], []

    def length(word):
        seen.append(word)
        return len(word)

    sampler = Sampler(words, length, 2, 0)
    assert seen == words and sampler.complexities.tolist() == [1, 3, 2, 4]
    sampler.set_epoch(1)
    assert seen == words
    assert {"".join(sorted(words[i] for i in row)) for row in sampler.chunks} == {"acc", "bbbdddd"}


def test_function_of_a_sample_may_give_tensors():
    sampler = Sampler(["a", "bbb"], lambda word: torch.tensor([float(len(word))], requires_grad=True), 2, 0)
    assert sampler.complexities.tolist() == [1, 3]


@pytest.mark.parametrize("options, sentence", [
    ({}, "either complexity_fn"),
    ({"complexity_fn": len, "complexities": [1, 2]}, "either complexity_fn"),
    ({"complexities": [1, 2, 3]}, r"shape \(3,\) for 2 samples"),
    ({"complexities": [1, float("nan")]}, "sample 1 is nan"),
    ({"complexities": [float("inf"), 1]}, "sample 0 is inf"),
    ({"complexity_fn": lambda sample: None}, "complexity_fn gives None for sample 0"),
    ({"complexity_fn": lambda sample: torch.ones(2)}, r"complexity_fn gives tensor\(\[1., 1.\]\) for sample 0"),
    ({"complexities": [1, 2], "random_level": 1.5}, "random_level is 1.5"),
    ({"complexities": [1, 2], "rank": 2}, "rank is 2 of 2"),
])
def test_wrong_arguments(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Sampler(["a", "b"], **{"num_replicas": 2, "rank": 0, **options})


# ----------------------------------------------------------------------------------------------------- elastic ----


def test_goes_on_with_other_numbers_of_ranks(job):
    """Three ranks make 4 steps of 2, then two ranks 3 steps of 3, then five ranks the rest: every sample once."""
    count, done, state = 97, [], {"epoch": 2, "done": []}
    for n, batches, batch_size in ((3, 4, 2), (2, 3, 3), (5, None, 1)):
        made = []
        for rank in range(n):
            job(rank, n)
            sampler = Sampler(range(count), complexities=costs(count))
            sampler.load_state_dict(state)
            assert (sampler.rank, sampler.num_replicas) == (rank, n)
            made.append(sampler)
        rows = steps(made)[:batches and batches * batch_size]
        done += itertools.chain(*rows)
        for sampler in made:
            for batch in range(batches or 0):
                sampler.record_batch(batch, batch_size)
        states = [sampler.state_dict() for sampler in made]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert set(done) == set(range(count)) and len(done) - count <= 2 + 1 + 4
    assert state["done"] == [(3, 24), (2, 18)]


def test_reset_in_place_and_next_epoch(job):
    job(0, 2)
    sampler = Sampler(range(20), complexities=costs(20))
    first = [list(sampler)[:3]]
    sampler.record_batch(0, 3)
    assert len(sampler) == 10           # until the next reset()
    job(1, 2)
    sampler.reset()
    assert len(sampler) == 7 and not set(first[0]) & set(sampler)
    sampler.set_epoch(1)
    assert len(sampler) == 10 and sampler.state_dict() == {"epoch": 1, "done": []}


def test_is_what_a_torch_state_saves(job):
    job(0, 2)
    sampler = Sampler(range(20), complexities=costs(20))
    state = hvd.elastic.TorchState(sampler=sampler)
    assert type(state._handlers["sampler"]) is SamplerStateHandler
    sampler.record_batch(0, 4)
    state.save()
    saved = sampler.state_dict()
    sampler.record_batch(1, 4)
    state.restore()
    assert sampler.state_dict() == saved and len(sampler) == 6


# ------------------------------------------------------------------------------------------- batches by cost ----


def padded(cost):
    return len(cost) * cost[-1]


@pytest.mark.parametrize("bound, cost", [(200, np.sum), (400, padded), (1, np.sum), (1e9, np.sum)])
@pytest.mark.parametrize("count, n", [(200, 3), (200, 2), (7, 3), (0, 2)])
@pytest.mark.parametrize("random_level", [0, 0.5])
def test_batches_within_a_bound(count, n, bound, cost, random_level):
    made = [BatchSampler(s, max_cost=bound, cost=cost) for s in samplers(count, n, random_level=random_level)]
    price = np.array(costs(count))
    every = [list(batches) for batches in made]
    assert {len(batches) for batches in every} == {len(made[0])}
    for row in zip(*every, strict=True):        # the batches of a step
        assert len({len(batch) for batch in row}) == 1
        assert all(len(batch) == 1 or cost(np.sort(price[batch])) <= bound for batch in row)
    assert sorted(i for batches in every for batch in batches for i in batch) == sorted(itertools.chain(*samplers(
        count, n, random_level=random_level)))


def test_batches_are_as_large_as_the_bound_lets_them_be():
    sampler, = samplers(200, 1, shuffle=False)
    batches, price = list(BatchSampler(sampler, max_cost=300)), np.array(costs(200))
    assert len(batches) > 3
    for batch, following in itertools.pairwise(batches):
        assert price[batch].sum() + price[following[0]] > 300


def test_batches_follow_the_epoch():
    batches = BatchSampler(samplers(100, 2)[0], max_cost=200)
    first = list(batches)
    assert first == list(batches)
    batches.set_epoch(1)
    assert batches.sampler.epoch == 1
    assert list(batches) != first and sorted(map(len, batches)) == sorted(map(len, first))
    batches.set_epoch(0)
    assert list(batches) == first


# --------------------------------------------------------------------------------------- batches by a function ----


def up_to_fours(indices):
    """Batches that end with a multiple of four, so that ranks have different numbers of batches."""
    ends = [k + 1 for k, i in enumerate(indices) if i % 4 == 0 or k == len(indices) - 1]
    return [indices[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count, n", [(50, 2), (50, 3), (31, 4)])
def test_all_ranks_have_equally_many(count, n, drop_last):
    made = samplers(count, n)
    own = [up_to_fours(list(sampler)) for sampler in made]
    counts = [len(batches) for batches in own]
    assert len(set(counts)) > 1
    for sampler, mine in zip(made, own, strict=True):
        batches = BatchSampler(sampler, up_to_fours, drop_last)
        expected = min(counts) if drop_last else max(counts)
        assert len(batches) == expected
        assert list(batches) == (mine * expected)[:expected]


def test_a_rank_without_a_batch():
    def batches(indices):
        return [indices] if 0 in indices else []

    made = samplers(9, 3)
    with pytest.raises(ValueError, match="made no batch of the 3 samples of rank"):
        list(BatchSampler(made[0], batches))
    assert list(BatchSampler(made[0], batches, drop_last=True)) == []


def test_wrong_arguments_of_batches():
    sampler, = samplers(9, 1)
    for options in ({}, {"batch_fn": up_to_fours, "max_cost": 3}):
        with pytest.raises(ValueError, match="either batch_fn"):
            BatchSampler(sampler, **options)
    with pytest.raises(ValueError, match="drop_last is for batch_fn"):
        BatchSampler(sampler, max_cost=3, drop_last=True)


def test_a_loader_takes_them():
    from torch.utils.data import DataLoader

    sampler = samplers(30, 2)[1]
    batches = BatchSampler(sampler, max_cost=100)
    loader = DataLoader(range(30), batch_sampler=batches)
    assert [batch.tolist() for batch in loader] == list(batches) and len(loader) == len(batches)
    assert [i for batch in DataLoader(range(30), 4, sampler=sampler) for i in batch.tolist()] == list(sampler)
