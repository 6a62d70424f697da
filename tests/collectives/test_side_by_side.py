"""Several collectives in flight at once: between two ranks, over sockets, and in two levels."""
import functools
import time

import numpy as np
import pytest

from bagua_hvd.core import native, vectors
from bagua_hvd.core.exceptions import HorovodInternalError
from low_precision import CODECS
from world import World, view

LARGE = 16 << 20            # elements: far more than socket buffers hold
LIMIT_S = 60


def post(context, name, array, blocking=False, **options):
    return context.post(native.ALLREDUCE, name, [view(array, "float32", "in place")], op=native.OP_SUM,
                        blocking=blocking, **options)


def test_what_is_on_its_way_goes_on_while_nobody_waits():
    """After a waiting thread has returned, the engine's own thread continues operations that began meanwhile."""
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


# Each posts its kind and returns the handle and a check of the result. count: a multiple of n.
def broadcast(context, name, rank, n, count=LARGE):
    x = np.full(count, float(rank), np.float32)
    return (context.post(native.BROADCAST, name, [view(x, "float32", "in place")], root_rank=1),
            lambda: (x == 1).all())


def reducescatter(context, name, rank, n, count=LARGE):
    x, out = np.full(count, rank + 1.0, np.float32), np.empty(count // n, np.float32)
    return (context.post(native.REDUCESCATTER, name, [view(x, "float32", out)], op=native.OP_SUM),
            lambda: (out == n * (n + 1) / 2).all())


def allgather(context, name, rank, n, count=LARGE):
    x, out = np.full(count // n, float(rank), np.float32), np.empty((n, count // n), np.float32)
    return (context.post(native.ALLGATHER, name, [view(x, "float32", out)]),
            lambda: (out == np.arange(n)[:, np.newaxis]).all())


def d_lp_s(context, name, rank, n, count=LARGE // 4, hosts="AABB"):
    """Values equal within a host are encoded without loss, so a replica becomes its host's mean."""
    mean = np.mean([other + 1.0 for other in range(n) if hosts[other] == hosts[rank]])
    x, replicas = np.full(count, rank + 1.0, np.float32), [np.zeros(count, np.float32) for _ in range(3)]
    return (context.post(native.D_LP_S, name, [view(x, "float32", "in place")], hierarchical=1,
                         replicas=[vectors.floats(x) for x in replicas], **CODECS[0].fields()),
            lambda: np.allclose(replicas[0], mean, rtol=1e-6))


@pytest.mark.parametrize("large", [broadcast, reducescatter, allgather, d_lp_s])
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
    """More operations than channels, of all kinds and lengths, in any order, some not resumable, in many sets."""
    n = len(hosts)
    counts = [1, 1000, 300_000, 70_000, 3, 1_500_000, 500, 20_000]
    kinds = [(kind, count * n) for count in (1, 1000, 200_000)
             for kind in (broadcast, reducescatter, allgather, functools.partial(d_lp_s, hosts=hosts))]
    some = [0, 1, n - 1]

    def call(rank, context):
        added = context.post(native.PROCESS_SET_ADD, "some", splits=some)
        added.wait()
        order = np.random.default_rng(rank)
        for round in range(3):
            arrays = [np.full(count, rank + i + 1.0, np.float32) for i, count in enumerate(3 * counts)]
            set_arrays = [np.full(count, rank + i + 1.0, np.float32) for i, count in enumerate(counts)]
            gathered = [np.empty(n * 1000, np.float32) for _ in range(2)]
            rows = np.full(1000, rank, np.float32)
            running, checks = [], []
            posts = [functools.partial(post, context, f"x{i}", x) for i, x in enumerate(arrays)]
            if rank in some:
                posts += [functools.partial(post, context, f"y{i}", x, process_set=added.value)
                          for i, x in enumerate(set_arrays)]
            posts += [functools.partial(kind, context, f"z{i}", rank, n, count)
                      for i, (kind, count) in enumerate(kinds)]
            posts.append(functools.partial(context.post, native.ALLGATHER, "g",
                                           [view(rows, "float32", x) for x in gathered]))
            for i in order.permutation(len(posts)):
                posted = posts[i]()
                running.append(posted[0] if isinstance(posted, tuple) else posted)
                checks += posted[1:] if isinstance(posted, tuple) else []
            for handle in running:
                handle.wait()
            assert all(is_right() for is_right in checks)
            for i, array in enumerate(arrays):
                assert (array == n * (n + 1) / 2 + n * i).all(), (round, i)
            for i, array in enumerate(set_arrays if rank in some else []):
                assert (array == sum(some) + len(some) * (i + 1)).all(), (round, i)
            for array in gathered:
                assert (array == np.repeat(np.arange(n), 1000)).all()

    with World(n, "auto", hosts=list(hosts), fusion_threshold=0) as world:
        world.run(call)


def test_in_two_levels_what_is_on_its_way_goes_on_while_nobody_waits():
    """Sleeping ranks are woken by ranks of their host and by sockets for other hosts."""
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
            context.shutdown()
            return
        with pytest.raises(HorovodInternalError, match="rank 1|shut down"):
            for step in range(1000):
                for handle in [post(context, f"x{i}.{step}", x.copy()) for i in range(4)]:
                    handle.wait()

    with World(4, "auto", hosts=list("AABB"), fusion_threshold=0) as world:
        world.run(call)
