"""Pairwise averages: after two identical requests they need no coordinator (native/core/negotiation/pairwise.h)."""
import random
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from bagua_hvd.core import native, vectors
from bagua_hvd.core.exceptions import HorovodInternalError
from low_precision import CODECS
from peers import EXPONENTIAL, RING, SHIFT_ONE, averaged, post, values
from world import World, view

COUNT = 70_000          # more than a segment
TRANSPORTS = ["inproc", "shm", "tcp"]


def run_average(context, name, x, topology=SHIFT_ONE, round=0):
    out = np.empty_like(x)
    post(context, name, [view(x, "float32", out)], topology, round).wait()
    return out


def make_pairwise(world, name, topology=SHIFT_ONE, round=0):
    """Makes the operation pairwise, so that it no longer needs the coordinator."""
    for _ in range(2):
        world.run(lambda rank, context: run_average(context, name, values("float32", COUNT, rank), topology, round))


@pytest.mark.parametrize("negotiation", ["star", "tree"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_rank_delays_its_neighbours_and_nobody_else(transport, negotiation):
    with World(6, transport, negotiation=negotiation, negotiation_fanout=2) as world:       # pairs: 0 3, 1 4, 2 5
        make_pairwise(world, "x")
        others_are_done = threading.Barrier(5)
        neighbour_is_done = threading.Event()

        def call(rank, context):
            asked = context.counters().cache_misses
            for step in range(20):
                if rank == 4 and step == 3:
                    others_are_done.wait(20)        # all but its neighbour, which never wait for this rank
                    assert not neighbour_is_done.is_set()
                got = run_average(context, "x", values("float32", COUNT, 100 * step + rank))
                inputs = [values("float32", COUNT, 100 * step + r) for r in range(6)]
                np.testing.assert_array_equal(got, averaged(SHIFT_ONE, "float32", inputs, rank, 0))
            if rank == 1:
                neighbour_is_done.set()
            elif rank != 4:
                others_are_done.wait(20)
            return context.counters().cache_misses - asked

        assert world.run(call) == [0] * 6


@pytest.mark.parametrize("topology", [SHIFT_ONE, EXPONENTIAL, RING])
@pytest.mark.parametrize("hosts", [None, "aabb", "abcd", "aaaa"])
def test_beside_other_operations_in_any_order(hosts, topology):
    """Names in different orders, at different times, with allreduces in between."""
    options = {"transport": "auto", "hosts": list(hosts)} if hosts else {}
    with World(4, **options) as world:
        def call(rank, context):
            order = random.Random(rank)
            for step in range(12):
                names = [f"x{i}" for i in range(4)]
                order.shuffle(names)
                xs = {name: values("float32", COUNT, int(name[1:]) + 10 * rank + 100 * step) for name in names}
                outs = {name: np.empty_like(x) for name, x in xs.items()}
                total = np.full(300_000, rank, np.float32)
                posted = [post(context, name, [view(xs[name], "float32", outs[name])], topology) for name in names[:2]]
                summed = context.post(native.ALLREDUCE, "sum", [view(total, "float32", "in place")])
                posted += [post(context, name, [view(xs[name], "float32", outs[name])], topology) for name in names[2:]]
                if order.random() < 0.2:
                    time.sleep(0.01)
                summed.wait()
                assert (total == 6).all()
                for operation in posted:
                    operation.wait()
                for name, out in outs.items():
                    inputs = [values("float32", COUNT, int(name[1:]) + 10 * r + 100 * step) for r in range(4)]
                    np.testing.assert_array_equal(out, averaged(topology, "float32", inputs, rank, 0))

        world.run(call)


def test_replicas_stay_equal_though_ranks_are_late():
    """D_LP_S in a ring, in which each operation uses the replicas of the previous one."""
    with World(4, "tcp") as world:
        def call(rank, context):
            own, left, right = (np.zeros(COUNT, np.float32) for _ in range(3))
            x, late = values("float32", COUNT, rank), random.Random(rank)
            for _ in range(20):
                difference = x - own
                if late.random() < 0.3:
                    time.sleep(0.01)
                context.post(native.D_LP_S, "d", [view(difference, "float32", "in place")], **CODECS[0].fields(0),
                             replicas=[vectors.floats(array) for array in (own, left, right)]).wait()
            return x, own, left, right

        replicas = world.run(call)
        for rank, (x, own, left, right) in enumerate(replicas):
            np.testing.assert_allclose(own, x, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(left, replicas[rank - 1][1])
            np.testing.assert_array_equal(right, replicas[(rank + 1) % 4][1])


@pytest.mark.parametrize("topology", [SHIFT_ONE, RING])
def test_all_may_ask_in_another_way_at_any_time(topology):
    """Another size in every fifth step, on ranks that are some steps apart."""
    with World(4, "tcp") as world:
        def call(rank, context):
            late = random.Random(rank)
            for step in range(40):
                count = COUNT + step // 5 % 2
                if late.random() < 0.3:
                    time.sleep(0.005)
                got = run_average(context, "x", values("float32", count, 100 * step + rank), topology)
                inputs = [values("float32", count, 100 * step + r) for r in range(4)]
                np.testing.assert_array_equal(got, averaged(topology, "float32", inputs, rank, 0))

        world.run(call)


def test_who_asks_in_another_way_and_its_neighbour_hear_it():
    with World(4, "tcp") as world:
        make_pairwise(world, "early")      # pairs: 0 2, 1 3
        make_pairwise(world, "late")

        def call(rank, context):
            for name, other_way in (("late", 1), ("early", 3)):
                time.sleep(0.3 if rank == 1 else 0)         # its neighbour already waits
                if rank % 2 == 0:
                    run_average(context, name, values("float32", COUNT, rank))
                    continue
                with pytest.raises(HorovodInternalError, match="Mismatched .* shapes"):
                    run_average(context, name, values("float32", COUNT + (rank == other_way), rank))
            total = np.full(5, rank, np.float32)            # the job still works
            context.post(native.ALLREDUCE, "sum", [view(total, "float32", "in place")]).wait()
            assert (total == 6).all()

        world.run(call)


def test_in_a_ring_all_hear_of_it_and_none_hangs():
    with World(5, "tcp") as world:
        make_pairwise(world, "x", RING)

        def call(rank, context):
            if rank == 2:
                time.sleep(0.3)
            with pytest.raises(HorovodInternalError, match="shapes|different arguments"):
                run_average(context, "x", values("float32", COUNT + (rank == 2), rank), RING)

        world.run(call)


def test_a_neighbour_joins():
    with World(4, "tcp") as world:
        make_pairwise(world, "x")
        make_pairwise(world, "y")
        has_heard = threading.Event()       # the others join later, so rank 1 is the one that has joined

        def call(rank, context):
            if rank in (0, 2):
                for _ in range(3):
                    run_average(context, "x", values("float32", COUNT, rank))
                assert has_heard.wait(20)
            elif rank == 3:
                for name, late in (("x", 0), ("y", 0.4)):   # first it waits during the join, then it posts after it
                    time.sleep(late)
                    with pytest.raises(HorovodInternalError, match="not supported with Join .* Rank 1 has joined"):
                        run_average(context, name, values("float32", COUNT, rank))
                has_heard.set()
            else:
                time.sleep(0.2)
            context.post(native.JOIN, "join").wait()
            asked = context.counters().cache_misses
            for step in range(4):                           # all continue afterwards
                got = run_average(context, "x", values("float32", COUNT, 100 * step + rank))
                inputs = [values("float32", COUNT, 100 * step + r) for r in range(4)]
                np.testing.assert_array_equal(got, averaged(SHIFT_ONE, "float32", inputs, rank, 0))
            # With a new id, so that a late frame for the old one is recognized.
            assert context.counters().cache_misses - asked == 1

        world.run(call)


def test_all_join_before_the_last_average_is_over():
    """Rank 1 has posted the average and joined when its neighbor posts: it still takes part."""
    with World(4, "tcp") as world:
        make_pairwise(world, "x", RING)
        has_joined = threading.Event()

        def call(rank, context):
            if rank == 0:
                assert has_joined.wait(20)
            x = values("float32", COUNT, rank)
            out = np.empty_like(x)
            average = post(context, "x", [view(x, "float32", out)], RING)
            if rank in (2, 3):
                average.wait()
            join = context.post(native.JOIN, "join")
            if rank == 1:
                time.sleep(0.2)                 # until its neighbors know
                has_joined.set()
            average.wait()
            join.wait()
            inputs = [values("float32", COUNT, r) for r in range(4)]
            np.testing.assert_array_equal(out, averaged(RING, "float32", inputs, rank, 0))

        world.run(call)


def test_who_has_begun_hears_that_the_neighbour_of_one_who_left_gives_up():
    with World(5, "tcp") as world:
        make_pairwise(world, "x", RING)

        def call(rank, context):
            if rank == 2:
                time.sleep(0.5)
                context.shutdown()
                return ""
            with pytest.raises(HorovodInternalError) as caught:
                run_average(context, "x", values("float32", COUNT, rank), RING)
            return str(caught.value)

        messages = world.run(call)
        assert all("rank 2 left the job" in messages[rank] for rank in range(5) if rank != 2)


def test_a_neighbour_leaves():
    with World(4, "tcp") as world:
        make_pairwise(world, "x")

        def call(rank, context):
            if rank == 1:
                time.sleep(0.2)
                context.shutdown()
            elif rank == 3:
                for _ in range(2):                          # first it waits for the other rank, then that rank has left
                    with pytest.raises(HorovodInternalError, match="rank 1 left the job|shut down"):
                        run_average(context, "x", values("float32", COUNT, rank))
            else:
                run_average(context, "x", values("float32", COUNT, rank))

        world.run(call)


@pytest.mark.parametrize("delay", [0, 1e-4, 3e-4, 1e-3])
def test_a_rank_posts_and_leaves_at_once(delay):
    """Its neighbor gets the average or an error; other pairs continue either way."""
    for _ in range(3):
        with World(4, "tcp") as world:
            make_pairwise(world, "x")              # pairs: 0 2, 1 3
            start, is_over = threading.Barrier(2), threading.Event()

            def call(rank, context, start=start, is_over=is_over):
                x = values("float32", COUNT, rank)
                if rank == 3:
                    start.wait(20)
                    post(context, "x", [view(x, "float32", np.empty_like(x))], SHIFT_ONE, 0)
                    context.shutdown()
                elif rank == 1:
                    start.wait(20)
                    time.sleep(delay)
                    with suppress(HorovodInternalError):
                        run_average(context, "x", x)
                    is_over.set()
                else:
                    assert is_over.wait(20)
                    inputs = [values("float32", COUNT, r) for r in range(4)]
                    got = run_average(context, "x", x)
                    np.testing.assert_array_equal(got, averaged(SHIFT_ONE, "float32", inputs, rank, 0))

            world.run(call)


@pytest.mark.parametrize("negotiation", ["star", "tree"])
def test_ranks_finish_what_is_theirs_after_rank_0_has_left(negotiation):
    """A rank in a ring may be a step behind a rank that is not its neighbour and shuts down."""
    with World(6, "tcp", negotiation=negotiation, negotiation_fanout=1) as world:
        make_pairwise(world, "x", RING)
        has_left = threading.Event()

        def call(rank, context):
            for step in range(3):
                if rank == 3 and step == 2:     # 1 and 5, rank 0's neighbours, wait only for 2 and 4
                    assert has_left.wait(20)
                    time.sleep(0.2)         # its goodbye has arrived
                got = run_average(context, "x", values("float32", COUNT, 10 * step + rank), RING)
                inputs = [values("float32", COUNT, 10 * step + r) for r in range(6)]
                np.testing.assert_array_equal(got, averaged(RING, "float32", inputs, rank, 0))
            if rank == 0:
                context.shutdown()
                has_left.set()
            else:
                with pytest.raises(HorovodInternalError, match="rank 0 left the job"):
                    context.post(native.BARRIER, "barrier").wait()

        world.run(call)


def test_a_process_set_is_removed_and_made_again():
    with World(4, "tcp") as world:
        for _ in range(2):
            def call(rank, context):
                added = context.post(native.PROCESS_SET_ADD, "add", splits=[1, 2, 3])
                added.wait()
                for step in range(4 if rank else 0):
                    x = values("float32", COUNT, rank + step)
                    context.post(native.D_FP_S, "x", [view(x, "float32", "in place")], topology=RING, round=0,
                                 process_set=added.value).wait()
                    inputs = [values("float32", COUNT, r + step) for r in (1, 2, 3)]
                    np.testing.assert_array_equal(x, averaged(RING, "float32", inputs, rank - 1, 0))
                context.post(native.PROCESS_SET_REMOVE, "remove", root_rank=added.value).wait()

            world.run(call)


def test_a_long_wait_names_the_rank():
    """At the stall limit, not at the second warning: rank 1 comes between the two."""
    with World(2, "tcp", stall_warning_ms=3000, stall_shutdown_ms=4000) as world:
        make_pairwise(world, "x")

        def call(rank, context):
            time.sleep(5.5 * rank)
            with pytest.raises(HorovodInternalError, match="'x' waits for rank 1 for longer than 4 seconds"):
                run_average(context, "x", values("float32", COUNT, rank))

        world.run(call)
