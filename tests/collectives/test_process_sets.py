"""Process sets in the core: removal and reuse of ids with operations in flight, sets without shared memory, errors."""
import threading
import time

import numpy as np
import pytest

import peers
from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from peers import values
from world import World, result, view

TRANSPORTS = pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])


def add(context, ranks):
    operation = context.post(native.PROCESS_SET_ADD, f"add.{ranks}", splits=ranks)
    operation.wait()
    return operation.value


def remove(context, set_id):
    operation = context.post(native.PROCESS_SET_REMOVE, f"remove.{set_id}", root_rank=set_id)
    operation.wait()
    return operation.value


def total(context, name, value, set_id=0, count=3):
    x = np.full(count, value, np.float32)
    context.post(native.ALLREDUCE, name, [view(x, "float32", "in place")], process_set=set_id, blocking=True).wait()
    assert np.all(x == x[0])
    return x[0]


@TRANSPORTS
def test_an_operation_never_runs_on_another_set_with_the_same_id(transport):
    """Posted ahead: an allreduce on {0, 1, 2}, the set's removal, and {0, 1}, which gets the same id."""
    with World(4, transport) as world:
        all_have_posted = threading.Barrier(4)

        def call(rank, context):
            old = add(context, [0, 1, 2])
            big = np.ones(1 << 22, np.float32)
            keep = context.post(native.ALLREDUCE, "long", [view(big, "float32", "in place")])
            removal = context.post(native.PROCESS_SET_REMOVE, "remove", root_rank=old)
            if rank == 3:
                all_have_posted.wait(30)
            addition = context.post(native.PROCESS_SET_ADD, "add", splits=[0, 1])
            x, late = np.full(3, rank + 1, np.float32), None
            if rank < 3:
                try:
                    late = context.post(native.ALLREDUCE, "x", [view(x, "float32", "in place")], process_set=old)
                except ValueError as error:     # the removal came first
                    assert "does not exist" in str(error)
                all_have_posted.wait(30)
            for operation in (keep, removal, addition):
                operation.wait()
            assert (removal.value, addition.value) == (1, old)
            if late is None:
                return
            # An allreduce before the removal sums over the old set; a later one fails on all members.
            try:
                late.wait()
                return x[0]
            except HorovodInternalError as error:
                assert "removed" in str(error)

        for _ in range(20):
            outcomes = world.run(call)[:3]
            assert outcomes in ([6.0] * 3, [None] * 3)
            world.run(lambda rank, context: remove(context, 1))


@TRANSPORTS
def test_reused_areas_keep_their_blocks(transport):
    """A slow reader of the old set's last block must not see the writes of a new set with the same id."""
    with World(4, transport) as world:
        def call(rank, context):
            for i in range(30):
                old = add(context, [0, 1, 2])
                x = np.full(60_000, i, np.float32)
                pending = context.post(native.BROADCAST, "b", [view(x, "float32", "in place")], process_set=old,
                                       root_rank=0) if rank < 3 else None
                removal = context.post(native.PROCESS_SET_REMOVE, "r", root_rank=old)
                addition = context.post(native.PROCESS_SET_ADD, "a", splits=[0, 1])
                for operation in filter(None, (pending, removal, addition)):
                    operation.wait()
                if rank < 2:
                    assert total(context, "y", 1000.0, addition.value, 60_000) == 2000.0
                assert np.all(x == i)
                assert remove(context, addition.value) == 1

        world.run(call)


@TRANSPORTS
def test_more_sets_than_areas_and_sets_of_one_rank(transport):
    with World(2, transport) as world:
        def call(rank, context):
            ids = [add(context, [0]), add(context, [1])]
            assert total(context, "alone", 5.0, ids[rank]) == 5.0
            x = np.full((3, 2), rank, np.float32)
            for kind in (native.ALLGATHER, native.REDUCESCATTER, native.ALLTOALL):
                operation = context.post(kind, f"alone.{kind}", [view(x, "float32")], process_set=ids[rank])
                operation.wait()
                np.testing.assert_array_equal(result(operation, 0, "float32", (2,)), x)

        world.run(call)
    with World(8, transport) as world:
        subsets = [[i for i in range(8) if bits >> i & 1] for bits in range(1, 90)]

        def call_many(rank, context):
            ids = [add(context, ranks) for ranks in subsets]
            assert ids == list(range(1, len(subsets) + 1))
            for set_id, ranks in zip(ids, subsets, strict=True):
                if rank in ranks:
                    assert total(context, f"s{set_id}", rank, set_id) == sum(ranks)

        world.run(call_many)


@TRANSPORTS
def test_posting_races_with_removal(transport):
    """Each operation completes or fails on all ranks."""
    with World(4, transport) as world:
        def call(rank, context):
            for i in range(100):
                set_id = add(context, [0, 1, 2])
                x = np.ones(3, np.float32)
                removal = context.post(native.PROCESS_SET_REMOVE, f"r{i}", root_rank=set_id)
                operation = None
                try:
                    operation = context.post(native.ALLREDUCE, f"x{i}", [view(x, "float32", "in place")],
                                             process_set=set_id)
                except ValueError:
                    pass                        # already removed, or not a member
                removal.wait()
                if operation:
                    try:
                        operation.wait()
                    except HorovodInternalError as error:
                        assert "removed" in str(error)

        world.run(call)


@TRANSPORTS
@pytest.mark.parametrize("members", [3, 4])
def test_a_removal_that_one_member_puts_before_a_pairwise_average(transport, members):
    """In a ring of four, rank 0 has begun the average by then; no rank waits until the timeout."""
    with World(5, transport) as world:
        def call(rank, context):
            set_id = add(context, list(range(members)))
            x = values("float32", 1000, rank)
            for step in range(0 if rank >= members else 3 if rank == 2 else 4):
                operation = peers.post(context, "x", [view(x, "float32", "in place")], peers.RING, process_set=set_id)
                if step < 3:
                    operation.wait()
            if rank == 2:
                time.sleep(0.2)
            try:
                remove(context, set_id)
                if rank < members:
                    operation.wait()
            except HorovodInternalError as error:
                return str(error)

        assert ("was removed" if members == 3 else "does not take part in 'x'") in world.run(call)[0]


@TRANSPORTS
def test_removal_waits_for_pairwise_averages(transport):
    """They start without the coordinator, at different times on each rank; all posted before the removal succeed."""
    with World(4, transport) as world:
        def call(rank, context):
            for i in range(20):
                set_id = add(context, [0, 1, 2])
                mine = [values("float32", 100_000, rank + 3 * k) for k in range(4)]
                for step in range(4 if rank < 3 else 0):
                    xs = [x.copy() for x in mine]
                    posted = [peers.post(context, f"x{k}", [view(x, "float32", "in place")], peers.RING,
                                         process_set=set_id) for k, x in enumerate(xs)]
                    if step < 3:
                        for operation in posted:
                            operation.wait()
                if rank == i % 3:
                    time.sleep(0.005)
                assert remove(context, set_id) == 1
                for k, operation in enumerate(posted if rank < 3 else ()):
                    operation.wait()
                    inputs = [values("float32", 100_000, r + 3 * k) for r in range(3)]
                    np.testing.assert_array_equal(xs[k], peers.averaged(peers.RING, "float32", inputs, rank, 0))

        world.run(call)


def test_refusals():
    with World(3) as world:
        def call(rank, context):
            set_id = add(context, [0, 1])
            with pytest.raises(HorovodInternalError, match="Mismatched process sets"):
                context.post(native.PROCESS_SET_ADD, "differ", splits=[0, 1 + rank % 2]).wait()
            with pytest.raises(ValueError, match="at least one rank"):
                context.post(native.PROCESS_SET_ADD, "empty", splits=[])
            if rank < 2:
                for kind in (native.JOIN, native.PROCESS_SET_ADD, native.PROCESS_SET_REMOVE):
                    with pytest.raises(ValueError, match="all ranks, not over process set"):
                        context.post(kind, "on a set", process_set=set_id, splits=[0])
            x = np.ones(3, np.float32)
            for kind in (native.ALLGATHER, native.ALLTOALL, native.REDUCESCATTER):
                with pytest.raises(ValueError, match="cannot be done in place"):
                    context.post(kind, "in place", [view(x, "float32", "in place")])
            assert total(context, "after", 1.0) == 3.0

        world.run(call)


def test_counters_do_not_wait():
    """Counters may be read while another thread waits for an operation that only the reader can complete."""
    read = threading.Event()
    with World(2) as world:
        def call(rank, context):
            if rank == 0:
                operation = context.post(native.BARRIER, "b")
                assert context.counters().operations == 0
                read.set()
            else:
                read.wait()
                operation = context.post(native.BARRIER, "b")
            operation.wait()

        world.run(call)


def add_among_members(context, ranks):
    operation = context.post(native.PROCESS_SET_ADD, f"members.{ranks}", splits=ranks, root_rank=1)
    operation.wait()
    return operation.value


@pytest.mark.parametrize("transport, negotiation", [("inproc", "star"), ("shm", "star"), ("tcp", "star"),
                                                    ("inproc", "tree")])
def test_members_alone_ask_for_a_set_while_others_are_elsewhere(transport, negotiation):
    """Ranks 0 and 3 do not call add(); ids are equal on all ranks afterwards, also of sets that all ranks add."""
    with World(4, transport, negotiation=negotiation) as world:
        def call(rank, context):
            set_id = add_among_members(context, [1, 2]) if rank in (1, 2) else None
            mine = total(context, "members", rank, set_id) if set_id is not None else None
            total(context, "all", 1)        # the set exists once this returns on any rank
            assert context.process_set_rank(1) == (-1, 0, 1, -1)[rank] and context.process_set_size(1) == 2
            assert context.process_set_size(2) == -1
            return set_id, mine, add(context, [0, 3])

        assert world.run(call) == [(None, None, 2), (1, 3.0, 2), (1, 3.0, 2), (None, None, 2)]


@TRANSPORTS
def test_overlapping_sets_of_members_and_one_that_is_there_already(transport):
    with World(3, transport) as world:
        def call(rank, context):
            pairs = [pair for pair in ([0, 1], [1, 2], [0, 2]) if rank in pair]
            ids = {tuple(pair): add_among_members(context, pair) for pair in pairs}
            assert [total(context, f"pair {pair}", rank, ids[tuple(pair)]) for pair in pairs] == [sum(p) for p in pairs]
            again = {tuple(pair): add_among_members(context, pair) for pair in pairs}
            assert again == ids
            assert add_among_members(context, [0, 1, 2]) == 0
            return ids

        ids = world.run(call)
        assert len({id for of_rank in ids for id in of_rank.values()}) == 3
        assert all(a[pair] == b[pair] for a in ids for b in ids for pair in a.keys() & b.keys())


def test_who_asks_for_a_set_of_others_is_refused():
    with World(2) as world:
        def call(rank, context):
            if rank == 0:
                with pytest.raises(ValueError, match="rank 0 requests a process set of which it is not a member"):
                    context.post(native.PROCESS_SET_ADD, "others", splits=[1], root_rank=1)
            return add_among_members(context, [rank]) if rank else None

        world.run(call)


def test_members_who_disagree_hear_it():
    with World(3) as world:
        def call(rank, context):
            ranks = {0: [0, 1], 1: [1, 2]}.get(rank)
            if ranks is None:
                return
            with pytest.raises(HorovodInternalError, match="tried to add different ranks"):
                context.post(native.PROCESS_SET_ADD, "one name", splits=ranks, root_rank=1).wait()

        world.run(call)
