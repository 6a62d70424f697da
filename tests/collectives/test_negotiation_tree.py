"""Negotiation in a tree of relays gives the same results as in a star, whichever ranks are relays (decision 23)."""
import threading

import numpy as np
import pytest

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from world import World, result, view

# A chain in which every rank but the last is a relay; two levels of relays; one relay per host.
SHAPES = pytest.mark.parametrize("n, options", [
    (3, {"transport": "inproc", "negotiation_fanout": 1}),
    (4, {"transport": "tcp", "negotiation_fanout": 1}),
    (8, {"transport": "tcp", "negotiation_fanout": 2}),
    (8, {"transport": "auto", "negotiation_fanout": 2, "hosts": "AAABBBCA"}),
], ids=lambda value: value if isinstance(value, int) else f"{value['transport']}-{value['negotiation_fanout']}")


def tree(n, **options):
    return World(n, **{"negotiation": "tree", "negotiation_fanout": 2, **options})


def allreduce(context, name, x, **options):
    return context.post(native.ALLREDUCE, name, [view(x, "float32", "in place")], **options)


def add(context, ranks):
    operation = context.post(native.PROCESS_SET_ADD, f"add.{ranks}", splits=ranks)
    operation.wait()
    return operation.value


@SHAPES
def test_operations_in_any_order(n, options):
    """New and known names in each rank's own order, batched differently on every rank."""
    def call(rank, context):
        order = np.random.default_rng(rank)
        for _ in range(4):
            arrays = [np.full(3 + i, rank + i, np.float32) for i in range(20)]
            running = {i: allreduce(context, f"x{i}", arrays[i]) for i in order.permutation(20)}
            rows = np.full((rank + 1, 2), rank, np.float32)
            gathered = context.post(native.ALLGATHER, "rows", [view(rows, "float32")])
            for i, operation in running.items():
                operation.wait()
                assert (arrays[i] == sum(range(n)) + n * i).all()
            gathered.wait()
            expected = np.repeat(range(n), range(1, n + 1))
            np.testing.assert_array_equal(result(gathered, 0, "float32", (2,))[:, 0], expected)

    with tree(n, **options) as world:
        world.run(call)


@SHAPES
def test_ids_that_were_forgotten(n, options):
    """Eight names, a cache of three: some ranks send ids that the coordinator has evicted."""
    def call(rank, context):
        for step in range(8):
            arrays = [np.full(2, rank + step, np.float32) for _ in range(8)]
            order = range(8) if rank % 2 else reversed(range(8))
            for operation in [allreduce(context, f"x{i}", arrays[i]) for i in order]:
                operation.wait()
            assert all((x == sum(range(n)) + n * step).all() for x in arrays)

    with tree(n, cache_capacity=3, **options) as world:
        world.run(call)


@SHAPES
def test_joins_and_disagreements(n, options):
    def call(rank, context):
        for round_number in range(3):
            x = np.ones(4, np.float32)
            for i in range(rank + 1):
                allreduce(context, f"step{i}", x, blocking=True).wait()
            join = context.post(native.JOIN, "join", blocking=True)
            join.wait()
            assert join.value == n - 1
            with pytest.raises(HorovodInternalError, match="Mismatched allreduce tensor shapes|One rank"):
                allreduce(context, f"differ{round_number}", np.ones(1 + (rank == n - 1), np.float32)).wait()

    with tree(n, **options) as world:
        world.run(call)


@SHAPES
def test_process_sets_that_overlap(n, options):
    subsets = {tuple(r for r in range(n) if r % 2 == 0), tuple(r for r in range(n) if r != 1), (1, n - 1), (0, n - 1)}
    subsets = sorted(map(list, subsets))

    def call(rank, context):
        for _ in range(3):
            ids = [add(context, ranks) for ranks in subsets]
            running = []
            for i in np.random.default_rng(rank).permutation(len(subsets)):
                if rank in subsets[i]:
                    x = np.full(5, rank, np.float32)
                    running.append((allreduce(context, f"set{i}", x, process_set=ids[i]), x, sum(subsets[i])))
            for operation, x, expected in running:
                operation.wait()
                assert (x == expected).all()
            for set_id in ids:
                context.post(native.PROCESS_SET_REMOVE, f"remove{set_id}", root_rank=set_id).wait()

    with tree(n, **options) as world:
        world.run(call)


@SHAPES
def test_relays_leave_and_others_go_on(n, options):
    """All but the first and the last rank leave during the others' traffic; no message is lost.

    A relay stays until its children have left.
    """
    first_steps = threading.Barrier(n)

    def call(rank, context):
        ends = add(context, [0, n - 1])
        first_steps.wait()
        if rank not in (0, n - 1):
            context.shutdown()
            return
        for step in range(60):
            arrays = [np.full(2, rank + step, np.float32) for _ in range(4)]
            for operation in [allreduce(context, f"x{i}", x, process_set=ends) for i, x in enumerate(arrays)]:
                operation.wait()
            assert all((x == n - 1 + 2 * step).all() for x in arrays)
        context.shutdown()

    with tree(n, **options) as world:
        world.run(call)


@SHAPES
def test_what_was_answered_is_done_when_rank_0_leaves(n, options):
    """Rank 0 finishes its part of a broadcast early; its goodbye must not overtake the response that relays forward."""
    def call(rank, context):
        x = np.full(3, 7.0 if rank == 0 else 0.0, np.float32)
        context.post(native.BROADCAST, "last", [view(x, "float32", "in place")], root_rank=0, blocking=True).wait()
        context.shutdown()
        return x.tolist()

    for _ in range(3):
        with tree(n, **options) as world:
            assert world.run(call) == [[7.0] * 3] * n


@SHAPES
def test_who_needs_a_rank_that_left_hears_it(n, options):
    def call(rank, context):
        allreduce(context, "together", np.ones(1, np.float32)).wait()
        if rank != 1:
            with pytest.raises(HorovodInternalError, match=r"rank \d left the job|shut down"):
                allreduce(context, "alone", np.ones(1, np.float32), blocking=True).wait()
        context.shutdown()

    with tree(n, **options) as world:
        world.run(call)


def test_rank_0_handles_one_message_for_each_child():
    """8 ranks, fan-out 2, known names one by one: rank 0 exchanges messages with two children, not with seven ranks."""
    steps = 50

    def call(rank, context):
        def ask():
            allreduce(context, "x", np.ones(1, np.float32), blocking=True).wait()

        ask()
        before = context.counters().negotiation_messages
        for _ in range(steps):
            ask()
        return context.counters().negotiation_messages - before

    def messages_of_rank_0(negotiation):
        with World(8, "shm", negotiation=negotiation, negotiation_fanout=2) as world:
            return world.run(call)[0] / steps

    early = 7 / steps       # requests of other ranks before rank 0 begins to count
    assert 14 - early <= messages_of_rank_0("star") <= 14
    # A child is itself a relay, whose requests may arrive in two or three messages.
    assert 4 <= messages_of_rank_0("tree") <= 12


def test_ranks_that_negotiate_differently_do_not_start():
    sentence = 'BAGUA_HVD_NEGOTIATION is "tree" .* on rank 0 but "star" and 2 on rank 1'
    with pytest.raises(HorovodInternalError, match=sentence):
        World(2, "tcp", negotiation=["tree", "star"], negotiation_fanout=2)


def test_an_unknown_shape_is_an_error():
    with pytest.raises(ValueError, match='BAGUA_HVD_NEGOTIATION is "ring"; known are star, tree'):
        World(1, negotiation="ring")
