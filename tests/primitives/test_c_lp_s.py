"""C_LP_S against its equation, bit for bit, with every codec.

    scatter_gather   out = concat_k D(Q(u_k)),  u_k = mean_i D(Q(v_i[k]))      v_i = x_i + error, u_k + error
    allgather        out = mean_i D(Q(v_i))
"""
import itertools

import numpy as np
import pytest

import low_precision
from bagua_hvd.core import native, vectors
from bagua_hvd.core.exceptions import HorovodInternalError
from floats import FLOATS, assert_same_bits, store, unaligned
from low_precision import CODECS, SEGMENT, chunks, encoded_bytes
from world import World, result, view

SCATTER_GATHER, ALLGATHER = native.EXCHANGE_SCATTER_GATHER, native.EXCHANGE_ALLGATHER
EXCHANGES = [SCATTER_GATHER, ALLGATHER]
COUNTS = [0, 1, 7, 1000]
MINMAX = CODECS[0]
ROTATED = [codec for codec in CODECS if codec.rotates]
# bits -> bound of the bias's energy relative to the mean's, for normal values and for lognormal ones (sigma 1.5)
BIAS = {1: (0.015, 0.06), 2: (5e-4, 3e-3), 3: (3e-5, 1e-4), 4: (1e-5, 1e-5)}

_names = itertools.count()


def expected(exchange, codec, dtype, inputs, factor, seeds=None, **errors):
    oracle = low_precision.scatter_gather if exchange == SCATTER_GATHER else low_precision.allgather
    return oracle(codec, dtype, inputs, seeds or seeds_of(inputs), factor, **errors)


def seeds_of(inputs):
    return [2**63 + 17 * rank for rank in range(len(inputs))]


def values(dtype, count, rank, step=0):
    return store(dtype, np.random.default_rng([count, rank, step]).standard_normal(count))


def post(context, name, views, codec=MINMAX, exchange=SCATTER_GATHER, seed=0, op=native.OP_AVERAGE, **arguments):
    return context.post(native.C_LP_S, name, views, op=op, exchange=exchange, **codec.fields(seed), **arguments)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{c.name}-{c.parameter}")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_equals_the_equation(world, exchange, codec):
    n = world.n
    for dtype, count in [*itertools.product(FLOATS, COUNTS), ("float32", 150_001)]:
        if codec.size(dtype, 1) == 0:
            continue
        inputs = [values(dtype, count, rank) for rank in range(n)]
        seeds, name = seeds_of(inputs), f"c.{next(_names)}"

        def call(rank, context, dtype=dtype, inputs=inputs, seeds=seeds, name=name):
            src, out = unaligned(inputs[rank]), unaligned(np.zeros_like(inputs[rank]))
            post(context, name, [view(src, dtype, out)], codec, exchange, seeds[rank]).wait()
            assert_same_bits(src, inputs[rank], "the source is only read")
            allocated = post(context, name, [view(src, dtype)], codec, exchange, seeds[rank])
            allocated.wait()
            post(context, name, [view(src, dtype, "in place")], codec, exchange, seeds[rank]).wait()
            return out, src, result(allocated, 0, dtype)

        wanted = expected(exchange, codec, dtype, inputs, 1 / n)
        for outs in world.run(call):
            for out in outs:
                assert_same_bits(out, wanted, (dtype, count))


@pytest.mark.parametrize("codec", ROTATED, ids=lambda c: f"{c.name}-{c.parameter}")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_codes_of_one_rotation_are_added_as_they_are(world, exchange, codec):
    """With the same seed on all ranks coefficients are summed; the sum is encoded again, or rotated back once."""
    n = world.n
    for dtype, count in [*itertools.product(FLOATS, COUNTS), ("float32", 70_001), ("float16", 1500)]:
        inputs = [values(dtype, count, rank) for rank in range(n)]
        if count == 1500:
            inputs[-1][3], inputs[0][700:] = np.nan, 65504      # a block with NaN; another at the end of the range
        seeds, name = [5] * n, f"c.{next(_names)}"

        def call(rank, context, dtype=dtype, inputs=inputs, name=name):
            array = inputs[rank].copy()
            post(context, name, [view(array, dtype, "in place")], codec, exchange, 5).wait()
            return array

        wanted = expected(exchange, codec, dtype, inputs, 1 / n, seeds=seeds)
        for out in world.run(call):
            assert_same_bits(out, wanted, (dtype, count))
            assert count != 1500 or np.isnan(out[:100]).all()


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_bias_of_both_passes(bits):
    """The mean of 10,000 rotations, on 4 ranks that share half of their values' energy.

    Each block has its own signs, so 10,000 blocks of the same values are 10,000 draws. The owner's quantizer sees a sum
    of levels instead of a rotated vector, which leaves a bias; its energy is bounded relative to the mean's.
    """
    n, draws, random = 4, 10_000, np.random.default_rng(6)
    codec = next(codec for codec in ROTATED if codec.bits == bits)._replace(parameter=512)
    for sigma, bound in zip((0, 1.5), BIAS[bits], strict=True):
        drawn = random.standard_normal((n + 1, 512)) * np.exp(sigma * random.standard_normal((n + 1, 512)))
        each = (np.sqrt(0.5) * (drawn[:n] + drawn[n])).astype(np.float32)

        def call(rank, context, each=each):
            array = np.tile(each[rank], draws)
            post(context, "biased", [view(array, "float32", "in place")], codec, seed=3).wait()
            return array

        with World(n) as world:
            results = world.run(call)[0].reshape(draws, 512).astype(np.float64)
        mean = each.mean(0, dtype=np.float64)
        noise = results.var(0, ddof=1).sum() / draws
        assert ((results.mean(0) - mean) ** 2).sum() - noise < bound * (mean**2).sum() + 0.3 * noise


def test_every_codec_takes_float32():
    assert all(codec.size("float32", 1) for codec in CODECS)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_several_segments_of_unequal_chunks(world, exchange):
    """The first chunk is one element longer than a segment, the others are one segment."""
    n, count, name = world.n, world.n * SEGMENT + 1, f"c.{next(_names)}"
    inputs = [values("float32", count, rank) for rank in range(n)]
    worker = [np.zeros(count, np.float32) for _ in range(n)]
    server = [np.zeros(SEGMENT + 1, np.float32) for _ in range(n)]
    errors = {"worker_errors": worker} | ({"server_errors": server} if exchange == SCATTER_GATHER else {})
    wanted = expected(exchange, MINMAX, "float32", inputs, 1 / n, **errors)

    def call(rank, context):
        array = inputs[rank].copy()
        own_worker, own_server = np.zeros(count, np.float32), np.zeros(SEGMENT + 1, np.float32)
        sent = context.counters().payload_bytes_sent
        post(context, name, [view(array, "float32", "in place")], MINMAX, exchange,
             worker_residual=vectors.floats(own_worker), server_residual=vectors.floats(own_server)).wait()
        return array, own_worker, own_server, context.counters().payload_bytes_sent - sent

    for rank, (out, own_worker, own_server, sent) in enumerate(world.run(call)):
        assert_same_bits(out, wanted)
        assert_same_bits(own_worker, worker[rank])
        assert_same_bits(own_server, server[rank])
        assert sent == traffic(exchange, MINMAX, count, n, rank)


def traffic(exchange, codec, count, n, rank):
    """Bytes that a rank sends."""
    if exchange == ALLGATHER:
        return (n - 1) * encoded_bytes(codec, "float32", 0, count)
    sizes = [encoded_bytes(codec, "float32", *chunk) for chunk in chunks(count, n)]
    return sum(sizes) + (n - 2) * sizes[rank]


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{c.name}-{c.parameter}")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_error_feedback(world, exchange, codec):
    """Equal to the equation bit for bit in every step, so the error of one step is sent in a later one."""
    n, count, name = world.n, 997, f"c.{next(_names)}"
    worker = [np.zeros(count, np.float32) for _ in range(n)]
    server = [np.zeros(native.chunk_count(count, n), np.float32) for _ in range(n)]
    kept = [(x.copy(), y.copy()) for x, y in zip(worker, server, strict=True)]
    errors = {"worker_errors": worker} | ({"server_errors": server} if exchange == SCATTER_GATHER else {})
    sent, exact, steps = np.zeros(count), np.zeros(count), 8
    for step in range(steps):
        inputs = [values("float32", count, rank, step) for rank in range(n)]

        def call(rank, context, inputs=inputs, step=step):
            array = inputs[rank].copy()
            post(context, name, [view(array, "float32", "in place")], codec, exchange, step,
                 worker_residual=vectors.floats(kept[rank][0]), server_residual=vectors.floats(kept[rank][1])).wait()
            return array

        wanted = expected(exchange, codec, "float32", inputs, 1 / n, seeds=[step] * n, **errors)
        for rank, out in enumerate(world.run(call)):
            assert_same_bits(out, wanted, step)
            assert_same_bits(kept[rank][0], worker[rank], step)
            assert_same_bits(kept[rank][1], server[rank], step)
        sent += wanted
        exact += np.mean(inputs, 0, dtype=np.float64)
    # Telescoping: sum of results = sum of means - mean of the workers' errors - the owners' errors.
    owed = np.mean(worker, 0, dtype=np.float64)
    if exchange == SCATTER_GATHER:
        of_chunks = zip(server, chunks(count, n), strict=True)
        owed += np.concatenate([error[:end - begin] for error, (begin, end) in of_chunks])
    scale = steps * max(1.0, np.abs(sent).max(), np.abs(owed).max())
    np.testing.assert_allclose(sent + owed, exact, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{c.name}-{c.parameter}")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_counters_are_the_formula(world, exchange, codec):
    """scatter_gather: 2 (n-1) |Q(N/n)| bytes; allgather: (n-1) |Q(N)|."""
    n, count, name = world.n, 150_001, f"c.{next(_names)}"

    def call(rank, context):
        array = np.ones(count, np.float32)
        before = context.counters().payload_bytes_sent
        post(context, name, [view(array, "float32", "in place")], codec, exchange).wait()
        return context.counters().payload_bytes_sent - before

    sent = world.run(call)
    assert sent == [traffic(exchange, codec, count, n, rank) for rank in range(n)]
    formula = 2 * codec.size("float32", count // n) if exchange == SCATTER_GATHER else codec.size("float32", count)
    assert sent == pytest.approx([(n - 1) * formula] * n, rel=0.02)


def test_sum_factors_and_several_tensors(world):
    shapes = [(3, 5), (0, 4), (), (33_000,), (1,), (70_001,)]
    n, name = world.n, f"c.{next(_names)}"
    inputs = [[values("float32", int(np.prod(shape)) + i, rank)[i:] for i, shape in enumerate(shapes)]
              for rank in range(n)]

    def call(rank, context):
        outs = [np.zeros_like(x) for x in inputs[rank]]
        views = [view(x, "float32", out, shape) for x, out, shape in zip(inputs[rank], outs, shapes, strict=True)]
        post(context, name, views, op=native.OP_SUM, prescale_factor=3.0, postscale_factor=0.1).wait()
        return np.concatenate(outs)

    scaled = [np.concatenate(x) * np.float32(3) for x in inputs]
    wanted = expected(SCATTER_GATHER, MINMAX, "float32", scaled, 0.1)
    for out in world.run(call):
        assert_same_bits(out, wanted)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_joined_ranks_send_zeros(exchange):
    n, count, codec = 3, 500, CODECS[-1]
    inputs = [values("float32", count, rank) * (rank != 1) for rank in range(n)]

    def call(rank, context):
        array = inputs[rank].copy()
        if rank != 1:
            post(context, "without rank 1", [view(array, "float32", "in place")], codec, exchange).wait()
        context.post(native.JOIN, "join").wait()
        return array

    with World(n) as world:
        outs = world.run(call)
        wanted = expected(exchange, codec, "float32", inputs, 1 / n, seeds=[0] * n)
        assert_same_bits(outs[0], wanted)
        assert_same_bits(outs[2], wanted)


def test_ranks_that_disagree_all_hear_it(world):
    if world.n == 1:
        pytest.skip("one rank agrees with itself")

    def call(rank, context):
        array, last = np.ones(8, np.float32), rank == world.n - 1
        views = [view(array, "float32", "in place")]
        with pytest.raises(HorovodInternalError, match="Mismatched codecs"):
            post(context, "codec", views, CODECS[-1] if last else MINMAX).wait()
        with pytest.raises(HorovodInternalError, match=r"Mismatched codecs.*parameter 0.25"):
            post(context, "parameter", views, CODECS[-1] if last else CODECS[-2]).wait()
        with pytest.raises(HorovodInternalError, match=r"Mismatched codecs.*exchange 1"):
            post(context, "exchange", views, exchange=ALLGATHER if last else SCATTER_GATHER).wait()
        post(context, "codec", views, seed=rank).wait()         # seeds may differ
        assert (array == 1).all()

    world.run(call)


def test_wrong_calls_are_refused_at_once():
    with World(1) as world:
        context, array = world.contexts[0], np.ones(8, np.float32)
        views = [view(array, "float32", "in place")]
        with pytest.raises(ValueError, match="unknown exchange 2"):
            post(context, "wrong", views, exchange=2)
        with pytest.raises(ValueError, match="codec 8 with parameter 1.5 does not take"):
            post(context, "wrong", views, CODECS[-1]._replace(parameter=1.5))
        for number, reason in {-1: "unknown codec -1", 0: "codec 0 .* does not take", 99: "unknown codec 99"}.items():
            with pytest.raises(ValueError, match=reason):
                context.post(native.C_LP_S, "wrong", views, codec=number)
        with pytest.raises(ValueError, match="does not take dtype int32"):
            post(context, "wrong", [view(np.ones(8, np.int32), "int32", "in place")])


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
def test_in_a_process_set(transport):
    members = [0, 3]
    inputs = [values("bfloat16", 999, rank) for rank in range(4)]

    def call(rank, context):
        operation = context.post(native.PROCESS_SET_ADD, "add", splits=members)
        operation.wait()
        array = inputs[rank].copy()
        if rank in members:
            post(context, "in the set", [view(array, "bfloat16", "in place")], process_set=operation.value).wait()
        return array

    with World(4, transport) as world:
        outs = world.run(call)
        wanted = expected(SCATTER_GATHER, MINMAX, "bfloat16", [inputs[i] for i in members], 1 / 2)
        for rank in members:
            assert_same_bits(outs[rank], wanted)
