"""D_LP_S against its equation, bit for bit, with every codec.

    own += D(Q(v_i))      left += D(Q(v_{i-1}))      right += D(Q(v_{i+1}))       indices modulo n
"""
import functools
import itertools

import numpy as np
import pytest

from bagua_hvd.core import native, vectors
from bagua_hvd.core.exceptions import HorovodInternalError
from floats import FLOATS, assert_same_bits, load, store, unaligned
from low_precision import CODECS, SEGMENT, encoded_bytes, seed_of, segments
from world import World, view

MINMAX = CODECS[0]

_names = itertools.count()


def decoded(codec, dtype, value, seed, rank):
    """D(Q(value)) in the wide dtype that is added to replicas."""
    out = np.empty_like(value)
    for part in segments(0, len(value)):
        out[part] = codec.round_trip(dtype, value[part], seed_of(codec, seed, rank, 0, part.start))
    return load(dtype, out)


def values(dtype, count, rank, step=0):
    return store(dtype, np.random.default_rng([count, rank, step]).standard_normal(count))


def post(context, name, views, replicas, codec=MINMAX, seed=0, **arguments):
    return context.post(native.D_LP_S, name, views, replicas=[vectors.floats(array) for array in replicas],
                        **codec.fields(seed), **arguments)


def add(replica, value):
    replica[:] = (replica + value).astype(np.float32)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{c.name}-{c.parameter}")
def test_equals_the_equation(world, codec):
    n, rounds = world.n, 3
    cases = [*itertools.product(FLOATS, [0, 1, 7, 1000]), ("float32", 150_001)]
    for dtype, count in cases:
        if codec.size(dtype, 1) == 0:
            continue
        start = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(n)]
        wanted, name = [x.copy() for x in start], f"d.{next(_names)}"
        for rank, step in itertools.product(range(n), range(rounds)):
            add(wanted[rank], decoded(codec, dtype, values(dtype, count, rank, step), 100 * rank + step, rank))

        def call(rank, context, dtype=dtype, count=count, start=start, name=name):
            replicas = [unaligned(start[i % n]) for i in (rank, rank - 1, rank + 1)]
            for step in range(rounds):
                value = values(dtype, count, rank, step)
                before = value.copy()
                post(context, name, [view(value, dtype, "in place")], replicas, codec, 100 * rank + step).wait()
                assert_same_bits(value, before, "values are only read")
            return replicas

        for rank, (own, left, right) in enumerate(world.run(call)):
            assert_same_bits(own, wanted[rank], (dtype, count))
            assert_same_bits(left, wanted[rank - 1], (dtype, count))
            assert_same_bits(right, wanted[(rank + 1) % n], (dtype, count))


def mixed(dtype, value, weights, replicas):
    """weights . (value, own, left, right), the replicas' part in float32, rounded to dtype."""
    terms = [np.float32(weight) * replica for weight, replica in zip(weights[1:], replicas, strict=True) if weight]
    total = functools.reduce(np.add, terms)
    real = np.float64 if dtype == "float64" else np.float32
    return store(dtype, real(weights[0]) * load(dtype, value).astype(real) + total if weights[0] else total)


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_mixed_with_replicas(world, dtype):
    """Two tensors, the second longer than a segment in float32; results from all operands, and from one replica."""
    n, counts = world.n, [5, 2000 if dtype != "float32" else SEGMENT + 9]
    start = [np.random.default_rng(rank).standard_normal(sum(counts)).astype(np.float32) for rank in range(n)]
    before = (-5 / 3, 1 / 3, 1 / 3)
    for after in ((0.5, 1, 0, 0.25), (0, 1, 0, 0)):
        sent = [values(dtype, sum(counts), rank) for rank in range(n)]
        wanted = [x.copy() for x in start]
        for rank in range(n):
            around = [start[i % n] for i in (rank, rank - 1, rank + 1)]
            add(wanted[rank], decoded(MINMAX, dtype, mixed(dtype, sent[rank], (1, *before), around), 0, rank))
        name = f"d.{next(_names)}"

        def call(rank, context, sent=sent, name=name, after=after):
            parts = [part.copy() for part in np.split(sent[rank], [counts[0]])]
            replicas = [start[i % n].copy() for i in (rank, rank - 1, rank + 1)]
            post(context, name, [view(part, dtype, "in place") for part in parts], replicas, before=before,
                 after=after).wait()
            return np.concatenate(parts)

        for rank, got in enumerate(world.run(call)):
            around = [wanted[i % n] for i in (rank, rank - 1, rank + 1)]
            assert_same_bits(got, mixed(dtype, sent[rank], after, around), (dtype, after))


def test_several_segments_tensors_and_replicas_that_are_not_kept(world):
    n, name = world.n, f"d.{next(_names)}"
    counts = [SEGMENT - 3, 7, SEGMENT]
    inputs = [values("float32", sum(counts), rank) for rank in range(n)]

    def call(rank, context):
        parts = [part.copy() for part in np.split(inputs[rank], np.cumsum(counts)[:-1])]
        views = [view(part, "float32", "in place") for part in parts]
        left, right = np.zeros(sum(counts), np.float32), np.zeros(sum(counts), np.float32)
        sent = context.counters().payload_bytes_sent
        post(context, name, views, [None, left, None]).wait()
        sent = context.counters().payload_bytes_sent - sent
        post(context, name, views, [None, None, right]).wait()
        post(context, name, views, [None, None, None]).wait()
        return left, right, sent

    for rank, (left, right, sent) in enumerate(world.run(call)):
        neighbours = {(rank - 1) % n, (rank + 1) % n} - {rank}
        assert sent == len(neighbours) * encoded_bytes(MINMAX, "float32", 0, sum(counts))
        assert_same_bits(left, decoded(MINMAX, "float32", inputs[rank - 1], 0, (rank - 1) % n))
        assert_same_bits(right, decoded(MINMAX, "float32", inputs[(rank + 1) % n], 0, (rank + 1) % n))


def test_difference_compression_comes_near_and_replicas_stay_equal(world):
    """v = x - own, repeated with the same x: every replica converges to its owner's x."""
    n, count, name = world.n, 3000, f"d.{next(_names)}"
    inputs = [values("float32", count, rank) for rank in range(n)]

    def call(rank, context):
        own, left, right = (np.zeros(count, np.float32) for _ in range(3))
        for _ in range(20):
            difference = inputs[rank] - own
            post(context, name, [view(difference, "float32", "in place")], [own, left, right]).wait()
        return own, left, right

    replicas = world.run(call)
    for rank, (own, left, right) in enumerate(replicas):
        np.testing.assert_allclose(own, inputs[rank], rtol=0, atol=1e-6)
        assert_same_bits(left, replicas[rank - 1][0])
        assert_same_bits(right, replicas[(rank + 1) % n][0])


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{c.name}-{c.parameter}")
def test_counters_are_the_formula(world, codec):
    """|Q(N)| bytes to each neighbour."""
    n, count, name = world.n, 150_001, f"d.{next(_names)}"

    def call(rank, context):
        before, replicas = context.counters().payload_bytes_sent, [np.zeros(count, np.float32) for _ in range(3)]
        post(context, name, [view(np.ones(count, np.float32), "float32", "in place")], replicas, codec).wait()
        return context.counters().payload_bytes_sent - before

    assert world.run(call) == [min(n - 1, 2) * codec.size("float32", count)] * n


def test_ranks_that_disagree_all_hear_it(world):
    if world.n == 1:
        pytest.skip("one rank agrees with itself")

    def call(rank, context):
        array, last = np.ones(8, np.float32), rank == world.n - 1
        own = np.zeros(8, np.float32)
        views = [view(array, "float32", "in place")]
        with pytest.raises(HorovodInternalError, match="Mismatched codecs"):
            post(context, "codec", views, [own, None, None], CODECS[-1] if last else MINMAX).wait()
        with pytest.raises(HorovodInternalError, match="Mismatched D_LP_S tensor shapes"):
            post(context, "shape", [view(array, "float32", "in place", (4,) if last else (8,))], [None] * 3).wait()
        assert (own == 0).all()
        post(context, "codec", views, [own, None, None]).wait()
        assert (own == 1).all()

    world.run(call)


@pytest.mark.parametrize("kept", range(3))
def test_replicas_of_an_operation_in_progress_are_refused(kept):
    """Ranks could begin two of them in different orders."""
    with World(2) as world:
        x = np.ones(8, np.float32)
        replicas = [[np.zeros(8, np.float32) if i == kept else None for i in range(3)] for _ in range(2)]
        views = [view(x, "float32", "in place")]
        first = post(world.contexts[0], "x", views, replicas[0])
        with pytest.raises(ValueError, match="'y' has replicas that 'x' uses, which has not ended: wait for it first"):
            post(world.contexts[0], "y", views, replicas[0])
        post(world.contexts[1], "x", views, replicas[1]).wait()
        first.wait()
        world.run(lambda rank, context: post(context, "y", views, replicas[rank]).wait())


def test_wrong_calls_are_refused_at_once():
    with World(1) as world:
        context, views = world.contexts[0], [view(np.ones(8, np.float32), "float32", "in place")]
        with pytest.raises(ValueError, match="codec 0 .* does not take"):
            context.post(native.D_LP_S, "wrong", views)
        with pytest.raises(ValueError, match="weight for the left replica, which is not kept"):
            post(context, "wrong", views, [None] * 3, before=(0, 1, 0))
        with pytest.raises(ValueError, match="need memory where its values are"):
            results = [view(np.ones(8, np.float32), "float32")]
            post(context, "wrong", results, [np.zeros(8, np.float32)] * 3, after=(0, 1, 0, 0))
        with pytest.raises(ValueError, match="takes no prescale"):
            post(context, "wrong", views, [None] * 3, prescale_factor=2.0)
        with pytest.raises(ValueError, match="must have one dtype"):
            post(context, "wrong", [*views, view(np.ones(8), "float64", "in place")], [None] * 3)
