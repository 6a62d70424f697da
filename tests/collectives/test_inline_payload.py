"""Small allreduces with known metadata travel inside the negotiation (core/negotiation/inline_payload.h)."""
import threading
import time

import numpy as np
import pytest

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from floats import load, store
from world import DTYPES, World, storage, view

OPS = [native.OP_SUM, native.OP_MIN, native.OP_MAX, native.OP_PRODUCT]
MOST_BYTES = 512


def post(context, name, array, dtype="float32", op=native.OP_SUM, **options):
    return context.post(native.ALLREDUCE, name, [view(array, dtype, "in place")], op=op, **options)


def reduce(context, name, array, *arguments, **options):
    post(context, name, array, *arguments, **options).wait()


def sent(context):
    return context.counters().payload_bytes_sent


@pytest.fixture(scope="module")
def world():
    with World(3, "tcp") as world:
        yield world


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_like_an_executed_one(world, dtype, op):
    def call(rank, context):
        name = f"{dtype}.{op}"
        bits = np.array([rank + 1, 3 - rank, 1], np.float32)
        results = []
        for _ in range(3):                  # the first sends a full request and is executed normally
            array = np.ascontiguousarray(store(dtype, bits).astype(storage(dtype)))
            before = sent(context)
            reduce(context, name, array, dtype, op)
            results.append((load(dtype, array).tolist(), sent(context) - before))
        return results

    for results in world.run(call):
        (first, moved), *others = results
        assert moved > 0
        assert others == [(first, 0)] * 2


def test_average_and_factors(world):
    def call(rank, context):
        for attempt in range(3):
            array = np.array([rank, 10.0], np.float32)
            reduce(context, "factors", array, op=native.OP_AVERAGE, prescale_factor=0.5, postscale_factor=4.0)
            assert array.tolist() == [2.0, 20.0], attempt

    world.run(call)


@pytest.mark.parametrize("nbytes", [MOST_BYTES, MOST_BYTES + 4])
def test_what_is_larger_is_executed(world, nbytes):
    def call(rank, context):
        moved = []
        for _ in range(2):
            array, before = np.full(nbytes // 4, rank + 1.0, np.float32), sent(context)
            reduce(context, f"large.{nbytes}", array)
            moved.append(sent(context) > before)
            assert (array == 6).all()
        return moved

    assert world.run(call) == [[True, nbytes > MOST_BYTES]] * 3


def test_beside_others_in_one_answer(world):
    """Fused operations are executed together, whether some are inline or not."""
    def call(rank, context):
        for _ in range(3):
            small = [np.full(2, rank + float(i), np.float32) for i in range(20)]
            large = np.full(1000, rank + 1.0, np.float32)
            handles = [post(context, f"fused.{i}", array) for i, array in enumerate([*small, large])]
            for handle in handles:
                handle.wait()
            assert all((array == 3 * i + 3).all() for i, array in enumerate(small)) and (large == 6).all()

    world.run(call)


def test_a_change_of_one_rank_is_refused_and_of_all_is_not(world):
    def call(rank, context):
        for count in (2, 2, 3, 3):
            array = np.full(count, rank + 1.0, np.float32)
            reduce(context, "changes", array)
            assert array.tolist() == [6.0] * count
        with pytest.raises(HorovodInternalError, match="changes"):
            reduce(context, "changes", np.zeros(3 if rank else 4, np.float32))
        array = np.full(3, rank + 1.0, np.float32)
        reduce(context, "changes", array)
        assert array.tolist() == [6.0] * 3

    world.run(call)


def test_a_rank_that_has_joined_gives_zeros():
    def call(rank, context):
        for round_number in range(3):
            array = np.full(2, rank + 1.0, np.float32)
            reduce(context, "joined", array)
            assert array.tolist() == [6.0] * 2
            if rank < 2:
                array = np.full(2, rank + 1.0, np.float32)
                reduce(context, "joined", array)
                assert array.tolist() == [3.0] * 2, round_number
            context.post(native.JOIN, "join").wait()

    with World(3, "tcp") as world:
        world.run(call)


def test_an_agreement_that_was_forgotten():
    """With a cache of one entry, each request evicts another, while ranks still refer to the evicted id."""
    def call(rank, context):
        for attempt in range(30):
            arrays = [np.full(1, rank + 1.0 + i, np.float32) for i in range(3)]
            order = range(3) if (rank + attempt) % 2 else reversed(range(3))
            handles = [post(context, f"forgotten.{i}", arrays[i]) for i in order]
            for handle in handles:
                handle.wait()
            assert [array.tolist() for array in arrays] == [[3.0], [5.0], [7.0]]

    with World(2, "tcp", cache_capacity=1) as world:
        world.run(call)


def test_who_asks_by_a_forgotten_id_and_joins():
    """A rank sends an evicted id and a join at once: the request that it repeats in full precedes its join."""
    evicted, asked = threading.Barrier(2), threading.Event()

    def call(rank, context):
        mine = context.post(native.PROCESS_SET_ADD, "set", splits=[0])
        mine.wait()
        x = np.full(3, rank + 1, np.float32)
        for _ in range(2):
            reduce(context, "x", x.copy())
        if rank == 0:
            for _ in range(2):
                reduce(context, "y", x.copy(), process_set=mine.value)     # evicts the only cache entry
        evicted.wait(20)
        if rank == 0:
            first = post(context, "x", x)
            time.sleep(0.3)
            large = np.ones(1 << 26, np.float32)            # the copy blocks the engine
            copy = context.post(native.ALLREDUCE, "large", [view(large, "float32", np.empty_like(large))],
                                process_set=mine.value)
            time.sleep(0.02)
            asked.set()
            first.wait()
            copy.wait()
            for _ in range(2):
                alone = np.ones(3, np.float32)
                time.sleep(0.2)                             # until the other rank has joined
                reduce(context, "x", alone)
                assert alone.tolist() == [1, 1, 1]
            join = context.post(native.JOIN, "join")
        else:
            assert asked.wait(20)
            first = post(context, "x", x)
            join = context.post(native.JOIN, "join")
            first.wait()
        assert x.tolist() == [3, 3, 3]
        join.wait()

    with World(2, "tcp", cache_capacity=1, timeout_ms=8000) as world:
        world.run(call)


def test_a_set_of_some_ranks(world):
    def call(rank, context):
        added = context.post(native.PROCESS_SET_ADD, "set", splits=[0, 2])
        added.wait()
        if rank != 1:
            for _ in range(3):
                array = np.full(1, rank + 1.0, np.float32)
                reduce(context, "in.set", array, process_set=added.value)
                assert array.tolist() == [4.0]

    world.run(call)


def test_threads_of_one_rank_at_once(world):
    def call(rank, context):
        def work(number):
            for _ in range(20):
                array = np.full(1, rank + float(number), np.float32)
                reduce(context, f"thread.{number}", array)
                right.append(array[0] == 3 + 3 * number)

        right = []
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(right) == 80 and all(right)

    world.run(call)
