"""D_FP_S against its equation: dst_i = sum_j W_ij x_j, bit for bit.

    shift_one   (x_i + x_p) / 2, p by the published schedule; n odd: p(i) = (round - i) mod n, its own peer pauses
    exponential, round_robin
                (x_i + x_p) / 2 with other p
    ring        (x_i + x_left + x_right) / 3
"""
import itertools

import numpy as np
import pytest

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from floats import FLOATS, assert_same_bits, unaligned
from peers import EXPONENTIAL, RING, ROUND_ROBIN, SHIFT_ONE, averaged, peers, post, values
from world import World, result, view

COUNTS = [0, 1, 7, 1000, 150_001]

_names = itertools.count()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("topology", [SHIFT_ONE, RING, EXPONENTIAL, ROUND_ROBIN])
def test_equals_the_equation(world, topology, dtype):
    n = world.n
    for count, round in itertools.product(COUNTS, (0, 1, 7)):
        inputs = [values(dtype, count, rank) for rank in range(n)]
        name = f"d.{next(_names)}"

        def call(rank, context, inputs=inputs, name=name, round=round):
            src, out = unaligned(inputs[rank]), unaligned(np.zeros_like(inputs[rank]))
            post(context, name, [view(src, dtype, out)], topology, round).wait()
            assert_same_bits(src, inputs[rank], "the source is only read")
            allocated = post(context, name, [view(src, dtype)], topology, round)
            allocated.wait()
            post(context, name, [view(src, dtype, "in place")], topology, round).wait()
            return out, src, result(allocated, 0, dtype)

        for rank, outs in enumerate(world.run(call)):
            expected = averaged(topology, dtype, inputs, rank, round)
            for out in outs:
                assert_same_bits(out, expected, (count, round, rank))


def test_several_tensors_are_one_vector(world):
    shapes = [(3, 5), (0, 4), (), (33_000,), (1,), (70_001,)]
    n, name = world.n, f"d.{next(_names)}"
    inputs = [[values("float16", int(np.prod(shape)) + i, rank)[i:] for i, shape in enumerate(shapes)]
              for rank in range(n)]

    def call(rank, context):
        outs = [np.zeros_like(x) for x in inputs[rank]]
        views = [view(x, "float16", out, shape) for x, out, shape in zip(inputs[rank], outs, shapes, strict=True)]
        post(context, name, views, RING).wait()
        return outs

    for rank, outs in enumerate(world.run(call)):
        for i, out in enumerate(outs):
            assert_same_bits(out, averaged(RING, "float16", [x[i] for x in inputs], rank, 0), (rank, i))


def test_both_sides_of_a_pair_have_the_same_bits_and_the_mean_is_kept(world):
    n, count = world.n, 5000
    inputs = [values("float32", count, rank) for rank in range(n)]
    for round in range(n):
        def call(rank, context, round=round):
            array = inputs[rank].copy()
            post(context, f"pair.{round}", [view(array, "float32", "in place")], round=round).wait()
            return array

        outs = world.run(call)
        for rank, out in enumerate(outs):
            for peer in peers(SHIFT_ONE, n, rank, round):
                assert_same_bits(out, outs[peer])
        np.testing.assert_allclose(np.mean(outs, 0), np.mean(inputs, 0), atol=1e-6)


def test_counters_are_the_formula(world):
    """N elements to each peer."""
    n, count = world.n, 150_001
    for topology, round in itertools.product((SHIFT_ONE, RING), range(3)):
        def call(rank, context, topology=topology, round=round):
            before = context.counters()
            array = np.ones(count, np.float32)
            post(context, f"c.{topology}.{round}", [view(array, "float32", "in place")], topology, round).wait()
            after = context.counters()
            return after.payload_bytes_sent - before.payload_bytes_sent

        for rank, sent in enumerate(world.run(call)):
            assert sent == 4 * count * len(set(peers(topology, n, rank, round)))


def test_ranks_that_disagree_all_hear_it(world):
    if world.n == 1:
        pytest.skip("one rank agrees with itself")

    def call(rank, context):
        array, last = np.ones(8, np.float32), rank == world.n - 1
        views = [view(array, "float32", "in place")]
        with pytest.raises(HorovodInternalError, match=r"Mismatched D_FP_S rounds.*round 3.*round 4"):
            post(context, "round", views, round=4 if last else 3).wait()
        with pytest.raises(HorovodInternalError, match=r"Mismatched D_FP_S rounds.*topology"):
            post(context, "topology", views, RING if last else SHIFT_ONE).wait()
        with pytest.raises(HorovodInternalError, match="Mismatched D_FP_S tensor shapes"):
            post(context, "shape", [view(array, "float32", "in place", (4,) if last else (8,))]).wait()
        post(context, "round", views, round=4).wait()
        assert (array == 1).all()

    world.run(call)


def test_wrong_calls_are_refused_at_once():
    with World(1) as world:
        context, array = world.contexts[0], np.ones(8, np.float32)
        views = [view(array, "float32", "in place")]
        for arguments, sentence in [
            ({"topology": 4}, "unknown topology 4"), ({"round": -1}, "negative"),
            ({"prescale_factor": 2.0}, "takes no prescale"), ({"postscale_factor": 0.5}, "takes no prescale"),
        ]:
            with pytest.raises(ValueError, match=sentence):
                post(context, "wrong", views, **arguments)
        with pytest.raises(ValueError, match="does not take dtype int32"):
            post(context, "wrong", [view(np.ones(8, np.int32), "int32", "in place")])
        with pytest.raises(ValueError, match="must have one dtype"):
            post(context, "wrong", [*views, view(np.ones(8), "float64", "in place")])


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
def test_process_sets_have_schedules_of_their_own(transport):
    """Ranks 1, 2 and 4 of five are a triangle."""
    members = [1, 2, 4]
    inputs = [values("float64", 999, rank) for rank in range(5)]

    def call(rank, context):
        operation = context.post(native.PROCESS_SET_ADD, "add", splits=members)
        operation.wait()
        array = inputs[rank].copy()
        if rank in members:
            post(context, "in the set", [view(array, "float64", "in place")], round=1,
                 process_set=operation.value).wait()
        return array

    with World(5, transport) as world:
        for rank, out in enumerate(world.run(call)):
            of_set = [inputs[i] for i in members]
            expected = averaged(SHIFT_ONE, "float64", of_set, members.index(rank), 1) if rank in members \
                else inputs[rank]
            assert_same_bits(out, expected, rank)


def test_a_joined_rank_cannot_be_averaged_with():
    def call(rank, context):
        if rank == 0:
            context.post(native.JOIN, "join").wait()
            return
        array = np.ones(8, np.float32)
        with pytest.raises(HorovodInternalError, match="Decentralized averaging is not supported with Join"):
            post(context, "with a joined rank", [view(array, "float32", "in place")]).wait()
        context.post(native.JOIN, "join").wait()

    with World(2) as world:
        world.run(call)
