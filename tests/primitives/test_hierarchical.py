"""The primitives between hosts, simulated by host ids: shared memory within each, sockets between them.

tests/support/two_levels.py computes the expected results.
"""
import itertools
import os

import numpy as np
import pytest

import low_precision
import two_levels
from bagua_hvd.core import native, vectors
from bagua_hvd.core.exceptions import HorovodInternalError
from floats import FLOATS, assert_same_bits, load, store, wide
from low_precision import CODECS, seed_of, segments
from two_levels import means, members_of, of_host, scaled, shards, within
from world import World, view

# One letter per rank names its host: one host, one rank per host, equal and unequal hosts, by host and round-robin.
HOSTS = ["A", "AAA", "ABC", "AAB", "AABB", "ABAB", "ABBBB", "AABBCC", "ABCABCA"]
MINMAX, SEEDED = CODECS[0], next(codec for codec in CODECS if codec.stochastic)
COUNTS = [0, 1, 1000, 150_001]

_names = itertools.count()
_boot = os.urandom(4).hex()


@pytest.fixture(scope="module", params=HOSTS)
def world(request):
    with World(len(request.param), "auto", hosts=[f"{_boot}.{host}" for host in request.param]) as w:
        w.hosts = members_of(request.param)
        yield w


def values(dtype, count, rank):
    return store(dtype, np.random.default_rng([count, rank]).standard_normal(count))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("topology", [native.TOPOLOGY_SHIFT_ONE, native.TOPOLOGY_RING])
def test_d_fp_s(world, topology, dtype):
    for count, round in itertools.product(COUNTS, (0, 1)):
        inputs, name = [values(dtype, count, rank) for rank in range(world.n)], f"d.{next(_names)}"

        def call(rank, context, inputs=inputs, name=name, round=round):
            out = np.empty_like(inputs[rank])
            context.post(native.D_FP_S, name, [view(inputs[rank], dtype, out)], topology=topology, round=round,
                         hierarchical=1).wait()
            in_place = inputs[rank].copy()
            context.post(native.D_FP_S, name, [view(in_place, dtype, "in place")], topology=topology, round=round,
                         hierarchical=1).wait()
            return out, in_place

        wanted = of_host(world.hosts, averaged(topology, dtype, means(dtype, inputs, world.hosts), round,
                                              [len(members) for members in world.hosts]))
        for rank, outs in enumerate(world.run(call)):
            for out in outs:
                assert_same_bits(out, wanted[rank], (count, round, rank))


def averaged(topology, dtype, hosts, round, sizes):
    """The flat equation, for at most three hosts, with weights for unequal numbers of ranks:

    shift_one   (s_i x_i + s_p x_p) / (s_i + s_p)
    ring        x_i + sum_p 1/3 min(1, s_p / s_i) (x_p - x_i), over a common denominator
    """
    n = len(hosts)
    if topology == native.TOPOLOGY_RING:
        peers = [[(i - 1) % n, (i + 1) % n] if n > 1 else [] for i in range(n)]
    elif n == 2:
        peers = [[1], [0]]
    else:
        peers = [[(round - i) % n] if (round - i) % n != i else [] for i in range(n)]
    results = []
    for i, (x, others) in enumerate(zip(hosts, peers, strict=True)):
        if any(sizes[j] != sizes[i] for j in others):
            results.append(store(dtype, weighted(topology, dtype, hosts, i, others, sizes)))
            continue
        total = load(dtype, x)
        for j in others:
            total = total + load(dtype, hosts[j])
        results.append(store(dtype, total * wide(dtype)(1 / (1 + len(others)))) if others else x)
    return results


def weighted(topology, dtype, hosts, i, others, sizes):
    if topology == native.TOPOLOGY_RING:
        shares = {j: others.count(j) * min(sizes[i], sizes[j]) for j in others}
        own, of = 3 * sizes[i] - sum(shares.values()), 3 * sizes[i]
    else:
        shares, own = {j: sizes[j] for j in others}, sizes[i]
        of = own + sum(shares.values())
    total = load(dtype, hosts[i]) * wide(dtype)(own)
    for j, share in shares.items():
        total = total + load(dtype, hosts[j]) * wide(dtype)(share)
    return total * wide(dtype)(1 / of)


@pytest.mark.parametrize("topology", [native.TOPOLOGY_SHIFT_ONE, native.TOPOLOGY_RING])
def test_averages_keep_the_mean_over_all_ranks(world, topology):
    """Any values; repeated rounds converge to the mean."""
    inputs, name = [values("float64", 100, rank) for rank in range(world.n)], f"mean.{next(_names)}"

    def call(rank, context):
        x = inputs[rank].copy()
        for round in range(60):
            context.post(native.D_FP_S, f"{name}.{round % 12}", [view(x, "float64", "in place")], topology=topology,
                         round=round % 12, hierarchical=1).wait()
            if round == 0:
                first = x.copy()
        return first, x

    first, last = (np.array(results) for results in zip(*world.run(call), strict=True))
    np.testing.assert_allclose(first.mean(0), np.mean(inputs, 0), atol=1e-12)
    np.testing.assert_allclose(last, np.broadcast_to(np.mean(inputs, 0), last.shape),
                               atol=1e-6 if len(world.hosts) > 1 or world.n == 1 else 1e-12)


@pytest.mark.parametrize("exchange", [native.EXCHANGE_SCATTER_GATHER, native.EXCHANGE_ALLGATHER])
@pytest.mark.parametrize("codec", [MINMAX, SEEDED], ids=lambda c: c.name)
@pytest.mark.parametrize("op", [native.OP_AVERAGE, native.OP_SUM])
def test_c_lp_s_with_error_feedback(world, op, codec, exchange):
    n, hosts, scatters = world.n, world.hosts, exchange == native.EXCHANGE_SCATTER_GATHER
    for dtype, count in itertools.product(["float32", "float16"], COUNTS):
        worker = [np.zeros(count, np.float32) for _ in range(n)]
        server = [np.zeros(count, np.float32) for _ in range(n)]
        kept = [(x.copy(), y.copy()) for x, y in zip(worker, server, strict=True)]
        name = f"c.{next(_names)}"
        for step in range(2):
            inputs = [values(dtype, count + step, rank)[step:] for rank in range(n)]

            def call(rank, context, inputs=inputs, dtype=dtype, kept=kept, step=step, name=name):
                out = np.empty_like(inputs[rank])
                context.post(native.C_LP_S, name, [view(inputs[rank], dtype, out)], op=op, exchange=exchange,
                             prescale_factor=2.0, postscale_factor=0.25, hierarchical=1,
                             worker_residual=vectors.floats(kept[rank][0]),
                             server_residual=vectors.floats(kept[rank][1]),
                             **codec.fields(10 * step + rank)).wait()
                return out

            outs = world.run(call)
            seeds, average = [10 * step + rank for rank in range(n)], op == native.OP_AVERAGE
            if 1 < len(hosts) < n:
                wanted = two_levels.c_lp_s(codec, dtype, inputs, hosts, seeds, average, 2, 0.25, not scatters,
                                           (worker, server))
            else:
                sums, factor = [scaled(dtype, x, 2) for x in inputs], 0.25 / n if average else 0.25
                # Flat, a server error begins with its chunk; in two levels it lies where its elements do.
                parts = low_precision.chunks(count, n)
                errors = (worker, [x[:end - begin] for x, (begin, end) in zip(server, parts, strict=True)])
                wanted = (low_precision.scatter_gather(codec, dtype, sums, seeds, factor, *errors) if scatters
                          else low_precision.allgather(codec, dtype, sums, seeds, factor, worker))
            for rank, out in enumerate(outs):
                assert_same_bits(out, wanted, (dtype, count, rank))
                assert_same_bits(kept[rank][0], worker[rank], (dtype, count, rank))
                assert_same_bits(kept[rank][1], server[rank], (dtype, count, rank))


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{c.name}-{c.parameter}")
def test_d_lp_s(world, codec):
    hosts = world.hosts
    for dtype, count in [("float32", 1000), ("bfloat16", 7), ("float32", 0), ("float32", 150_001),
                         ("float32", 3 * low_precision.SEGMENT // 2)]:
        if codec.size(dtype, 1) == 0:
            continue
        inputs, name = [values(dtype, count, rank) for rank in range(world.n)], f"d.{next(_names)}"

        def call(rank, context, inputs=inputs, dtype=dtype, count=count, name=name):
            replicas, value = [np.zeros(count, np.float32) for _ in range(3)], inputs[rank].copy()
            for step in range(2):
                context.post(native.D_LP_S, name, [view(value, dtype, "in place")], hierarchical=1,
                             replicas=[vectors.floats(x) for x in replicas], **codec.fields(10 * step + rank)).wait()
            assert_same_bits(value, inputs[rank], "only read")
            return replicas

        owns = []
        for host, (members, mean) in enumerate(zip(hosts, means(dtype, inputs, hosts), strict=True)):
            own = np.zeros(count, np.float32)
            for step, part in itertools.product(range(2), segments(0, count)):
                seed = seed_of(codec, 10 * step + members[0], host, 0, part.start)
                own[part] = own[part] + load(dtype, codec.round_trip(dtype, mean[part], seed))
            owns.append(own)
        for rank, (own, left, right) in enumerate(world.run(call)):
            host = next(i for i, members in enumerate(hosts) if rank in members)
            assert_same_bits(own, owns[host], (dtype, count, rank))
            assert_same_bits(left, owns[host - 1], (dtype, count, rank))
            assert_same_bits(right, owns[(host + 1) % len(hosts)], (dtype, count, rank))


def test_ranks_that_disagree_all_hear_it(world):
    if world.n == 1:
        pytest.skip("one rank agrees with itself")

    def call(rank, context):
        array = np.ones(8, np.float32)
        for kind, fields in ((native.D_FP_S, {}), (native.D_LP_S, MINMAX.fields()), (native.C_LP_S, MINMAX.fields())):
            with pytest.raises(HorovodInternalError, match="a hierarchical one, but|for a flat one"):
                context.post(kind, f"levels.{kind}", [view(array, "float32", "in place")], hierarchical=rank == 0,
                             **fields).wait()
        assert (array == 1).all()

    world.run(call)


def test_a_joined_rank_sends_zeros():
    inputs = [values("float32", 500, rank) * (rank != 1) for rank in range(4)]

    def call(rank, context):
        array = inputs[rank].copy()
        if rank != 1:
            context.post(native.C_LP_S, "without rank 1", [view(array, "float32", "in place")], op=native.OP_AVERAGE,
                         hierarchical=1, **MINMAX.fields()).wait()
        context.post(native.JOIN, "join").wait()
        return array

    hosts = members_of("AABB")
    with World(4, "auto", hosts=[f"{_boot}.{host}" for host in "AABB"]) as world:
        outs = world.run(call)
    sums = [within("float32", inputs, members, 1, 0.5) for members in hosts]
    wanted = np.empty(500, np.float32)
    for part, _ in shards(hosts, 2000, 4):
        wanted[part] = low_precision.scatter_gather(MINMAX, "float32", [x[part] for x in sums], [0, 0], 0.5)
    for rank in (0, 2, 3):
        assert_same_bits(outs[rank], wanted, rank)


@pytest.mark.parametrize("hosts", ["AABB", "ABABA"])
def test_those_in_flight_together_are_as_one_after_the_other(hosts):
    """Concurrent operations with shared error states run in order; vectors have several pieces."""
    n, counts = len(hosts), [5_000, 300_000, 40_000, 1]
    most = max(counts)

    def call(rank, context, together):
        states = [(np.zeros(most, np.float32), np.zeros(most, np.float32)) for _ in range(2)]
        results = []
        for step in range(3):
            running, arrays = [], []
            for i, count in enumerate(2 * counts):
                array = values("float32", count, rank + 10 * i + 100 * step)
                arrays.append(array)
                if i % 3 == 2:
                    posted = context.post(native.D_FP_S, f"d{i}", [view(array, "float32", "in place")], round=step,
                                          topology=native.TOPOLOGY_SHIFT_ONE, hierarchical=1)
                else:
                    worker, server = states[i % 2]
                    posted = context.post(native.C_LP_S, f"c{i}", [view(array, "float32", "in place")], hierarchical=1,
                                          op=native.OP_AVERAGE, worker_residual=vectors.floats(worker[:count]),
                                          server_residual=vectors.floats(server[:count]), **MINMAX.fields())
                if together:
                    running.append(posted)
                else:
                    posted.wait()
            for posted in running:
                posted.wait()
            results += arrays
        return [*results, *states[0], *states[1]]

    outs = []
    for together in (False, True):
        with World(n, "auto", hosts=[f"{_boot}.{host}" for host in hosts]) as world:
            outs.append(world.run(lambda rank, context, together=together: call(rank, context, together)))
    for rank, (one_by_one, at_once) in enumerate(zip(*outs, strict=True)):
        for i, (wanted, got) in enumerate(zip(one_by_one, at_once, strict=True)):
            assert_same_bits(got, wanted, (rank, i))


def test_sets_without_shared_memory_say_so():
    """The first 64 sets of a job have shared memory, which hosts need to be peers."""
    def call(rank, context):
        array = np.full(8, rank, np.float32)
        for i in range(1, 65):
            ranks = [r for r in range(8) if i >> r & 1 or r == 7] if i < 64 else [0, 1]
            operation = context.post(native.PROCESS_SET_ADD, f"add.{i}", splits=ranks)
            operation.wait()
        assert operation.value == 64
        if rank < 2:
            with pytest.raises(HorovodInternalError, match="process set 64 has no shared memory of its own"):
                context.post(native.D_FP_S, "late", [view(array, "float32", "in place")], hierarchical=1,
                             process_set=64).wait()
            context.post(native.D_FP_S, "late", [view(array, "float32", "in place")], process_set=64).wait()
            assert (array == 0.5).all()

    with World(8, "shm") as world:
        world.run(call)
