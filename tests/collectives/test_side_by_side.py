"""Several collectives on their way at once: between two ranks, over sockets, and in two levels."""
import functools
import time

import numpy as np
import pytest

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from world import World, view

LARGE = 16 << 20            # elements: far more than sockets hold
LIMIT_S = 60


def post(context, name, array, blocking=False, **options):
    return context.post(native.ALLREDUCE, name, [view(array, "float32", "in place")], op=native.OP_SUM,
                        blocking=blocking, **options)


def test_what_is_on_its_way_goes_on_while_nobody_waits():
    """A thread has waited for another operation and gone: the engine's own thread wakes for what began meanwhile."""
    def call(rank, context):
        large, small = np.full(LARGE, rank + 1.0, np.float32), np.full(1, rank + 1.0, np.float32)
        if rank:
            time.sleep(0.4)         # so that both begin while rank 0 waits for the small one ...
        handle = post(context, "large", large)
        if not rank:
            time.sleep(0.2)         # ... and its engine's thread sleeps
        post(context, "small", small, blocking=True).wait()
        deadline = time.monotonic() + LIMIT_S
        while not handle.done() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert handle.done()
        handle.wait()
        assert small[0] == 3 and (large == 3).all()

    with World(2, "tcp", "ring", fusion_threshold=0) as world:
        world.run(call)


@pytest.mark.parametrize(("n", "count", "made"), [
    pytest.param(2, 1, functools.partial(World, 2, "tcp", "ring"), id="over sockets"),
    pytest.param(4, 1000, functools.partial(World, 4, "auto", hosts=list("AABB")), id="in two levels"),
])
def test_a_small_one_ends_before_a_large_one(n, count, made):
    def call(rank, context):
        passed = False
        for attempt in range(20):
            large, small = np.full(LARGE, 1.0, np.float32), np.full(count, 1.0, np.float32)
            handle = post(context, f"large.{attempt}", large)
            post(context, f"small.{attempt}", small, blocking=True).wait()
            passed = passed or not handle.done()
            handle.wait()
            assert (small == n).all() and (large == n).all()
        return passed

    with made(fusion_threshold=0) as world:
        assert all(world.run(call))


def broadcast(context, name, rank, n):
    x = np.full(LARGE, float(rank), np.float32)
    return (context.post(native.BROADCAST, name, [view(x, "float32", "in place")], root_rank=1),
            lambda: (x == 1).all())


def reducescatter(context, name, rank, n):
    x, out = np.full(LARGE, rank + 1.0, np.float32), np.empty(LARGE // n, np.float32)
    return (context.post(native.REDUCESCATTER, name, [view(x, "float32", out)], op=native.OP_SUM),
            lambda: (out == n * (n + 1) / 2).all())


@pytest.mark.parametrize("large", [broadcast, reducescatter])
def test_in_two_levels_a_small_one_ends_before_a_large_one_of_any_kind(large):
    def call(rank, context):
        passed = False
        for attempt in range(20):
            handle, is_right = large(context, f"large.{attempt}", rank, 4)
            small = np.full(1000, 1.0, np.float32)
            post(context, f"small.{attempt}", small, blocking=True).wait()
            passed = passed or not handle.done()
            handle.wait()
            assert (small == 4).all() and is_right()
        return passed

    with World(4, "auto", hosts=list("AABB"), fusion_threshold=0) as world:
        assert all(world.run(call))


@pytest.mark.parametrize("hosts", ["AABB", "ABABA", "ABBB", "AABBBCC"])
def test_in_two_levels_many_go_on_at_once(hosts):
    """More than there are lanes, of all lengths, in any order, beside what runs to its end, in sets that overlap."""
    n = len(hosts)
    counts = [1, 1000, 300_000, 70_000, 3, 1_500_000, 500, 20_000]
    some = [0, 1, n - 1]

    def call(rank, context):
        added = context.post(native.PROCESS_SET_ADD, "some", splits=some)
        added.wait()
        order = np.random.default_rng(rank)
        for round in range(3):
            arrays = [np.full(count, rank + i + 1.0, np.float32) for i, count in enumerate(3 * counts)]
            set_arrays = [np.full(count, rank + i + 1.0, np.float32) for i, count in enumerate(counts)]
            gathered = [np.empty(n * 1000, np.float32) for _ in range(3)]
            rows = np.full(1000, rank, np.float32)
            running = []
            for i in order.permutation(len(arrays) + len(set_arrays) + len(gathered)):
                if i < len(arrays):
                    running.append(post(context, f"x{i}", arrays[i]))
                elif i < len(arrays) + len(set_arrays):
                    i -= len(arrays)
                    if rank in some:
                        running.append(post(context, f"y{i}", set_arrays[i], process_set=added.value))
                else:
                    i -= len(arrays) + len(set_arrays)
                    running.append(context.post(native.ALLGATHER, f"g{i}", [view(rows, "float32", gathered[i])]))
            for handle in running:
                handle.wait()
            for i, array in enumerate(arrays):
                assert (array == n * (n + 1) / 2 + n * i).all(), (round, i)
            for i, array in enumerate(set_arrays if rank in some else []):
                assert (array == sum(some) + len(some) * (i + 1)).all(), (round, i)
            for array in gathered:
                assert (array == np.repeat(np.arange(n), 1000)).all()

    with World(n, "auto", hosts=list(hosts), fusion_threshold=0) as world:
        world.run(call)


def test_in_two_levels_what_is_on_its_way_goes_on_while_nobody_waits():
    """Ranks that sleep wake each other for their host's steps, and sockets wake them for the others'."""
    def call(rank, context):
        arrays = [np.full(LARGE // 8, rank + 1.0, np.float32) for _ in range(6)]
        time.sleep(0.1 * rank)
        handles = [post(context, f"x{i}", array) for i, array in enumerate(arrays)]
        deadline = time.monotonic() + LIMIT_S
        while not all(handle.done() for handle in handles) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert all(handle.done() for handle in handles)
        for handle in handles:
            handle.wait()
        assert all((array == 10).all() for array in arrays)

    with World(4, "auto", hosts=list("AABB"), fusion_threshold=0) as world:
        world.run(call)


def test_in_two_levels_who_has_left_is_named():
    def call(rank, context):
        x = np.ones(1000, np.float32)
        post(context, "together", x).wait()
        if rank == 1:
            context.close()
            return
        with pytest.raises(HorovodInternalError, match="rank 1|shut down"):
            for step in range(1000):
                for handle in [post(context, f"x{i}.{step}", x.copy()) for i in range(4)]:
                    handle.wait()

    with World(4, "auto", hosts=list("AABB"), fusion_threshold=0) as world:
        world.run(call)
