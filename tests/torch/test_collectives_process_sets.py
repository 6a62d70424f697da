"""Process sets, static and dynamic, and join."""
import os

import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd.job import basics


def static_sets():
    even, high = hvd.ProcessSet([2, 0]), hvd.ProcessSet([1, 2])
    assert even.ranks == [0, 2] and even.process_set_id is None
    assert even.size() is None and even.rank() is None
    with pytest.raises(ValueError):
        hvd.ProcessSet([0, "1"])
    for duplicate in ([even, hvd.ProcessSet([0, 2])], [hvd.ProcessSet([0, 1, 2])], [hvd.ProcessSet([0, 3])]):
        with pytest.raises(ValueError):
            hvd.init(process_sets=duplicate)
        assert not hvd.is_initialized()
    hvd.init(process_sets=[even, high])
    for arguments in ({}, {"process_sets": (even, high)}, {"process_sets": []}, {"comm": [0, 1, 2]}):
        hvd.init(**arguments)
    again = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[[1, 2], again])
    for others in ([even], [hvd.ProcessSet([0, 1])], "dynamic"):
        with pytest.raises(ValueError, match="init.. has run already.*pass process_sets to the first call"):
            hvd.init(process_sets=others)
    with pytest.raises(ValueError, match="a job over a subset"):
        hvd.init(comm=[0, 1])
    rank = hvd.rank()
    assert (even.process_set_id, high.process_set_id, again.process_set_id) == (1, 2, 1)
    assert hvd.global_process_set.ranks == [0, 1, 2] and hvd.global_process_set.process_set_id == 0
    assert "process_set_id=1, ranks=[0, 2], mpi_comm=None" in str(even)
    for process_set in (even, high, hvd.global_process_set):
        ranks = process_set.ranks
        assert process_set.size() == len(ranks)
        assert process_set.included() == (rank in ranks)
        mine = torch.tensor([float(rank)])
        if rank not in ranks:
            with pytest.raises(ValueError):
                process_set.rank()
            for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
                with pytest.raises(ValueError, match=f"Rank {rank} is not a member of the provided process set"):
                    call(mine, process_set=process_set)
            with pytest.raises(ValueError):
                hvd.barrier(process_set=process_set)
            continue
        position = ranks.index(rank)
        assert process_set.rank() == position
        # Names are separate in each set.
        assert hvd.allreduce(mine, name="a", process_set=process_set).item() == sum(ranks) / len(ranks)
        assert hvd.allgather(mine, name="a", process_set=process_set).tolist() == ranks
        assert hvd.broadcast(mine, ranks[-1], name="a", process_set=process_set).item() == ranks[-1]
        with pytest.raises(ValueError, match="root rank"):
            hvd.broadcast(mine, next(iter(set(range(4)) - set(ranks))), name="a", process_set=process_set)
        rows = torch.arange(2 * len(ranks)) + 10 * rank
        expected = [10 * r + 2 * position + i for r in ranks for i in range(2)]
        assert hvd.alltoall(rows, name="a", process_set=process_set).tolist() == expected
        scattered = hvd.reducescatter(torch.ones(len(ranks) + 1), name="a", op=hvd.Sum, process_set=process_set)
        assert scattered.tolist() == [len(ranks)] * (2 if position == 0 else 1)
        assert hvd.broadcast_object(rank, ranks[0], name="o", process_set=process_set) == ranks[0]
        with pytest.raises(NotImplementedError):
            if process_set is hvd.global_process_set:
                raise NotImplementedError   # all three ranks; Adasum on a subset raises it for another reason
            hvd.allreduce(mine, op=hvd.Adasum, process_set=process_set)
        hvd.barrier(process_set=process_set)
    with pytest.raises(NotImplementedError):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum)
    with pytest.raises(ValueError, match="HOROVOD_DYNAMIC_PROCESS_SETS"):
        hvd.add_process_set([0, 1])
    with pytest.raises(ValueError, match="HOROVOD_DYNAMIC_PROCESS_SETS"):
        hvd.remove_process_set(even)
    hvd.barrier()
    hvd.shutdown()
    assert even.process_set_id is again.process_set_id is None
    hvd.init(process_sets=[even])
    assert even.process_set_id == again.process_set_id == 1 and high.process_set_id is None


def unknown_set():
    """A ProcessSet with an unknown id is refused by every function."""
    hvd.init()
    gone = hvd.ProcessSet([0])
    gone.process_set_id = 7
    x = torch.ones(2)
    for collective, *arguments in (
            (hvd.allreduce, x), (hvd.allreduce_async_, x), (hvd.allgather, x), (hvd.alltoall, x), (hvd.barrier,),
            (hvd.reducescatter, x), (hvd.broadcast, x, 0), (hvd.grouped_allreduce, [x]), (hvd.broadcast_object, 1),
            (hvd.DistributedOptimizer, torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))):
        with pytest.raises(ValueError, match="is not registered, or has been removed"):
            collective(*arguments, process_set=gone)
    assert hvd.allreduce(x, op=hvd.Sum).tolist() == [2.0, 2.0]


def test_unknown_set(run_ranks):
    run_ranks(2, unknown_set)


def unnamed_in_sets():
    """Operations without a name match within their set, whatever else each rank has posted or failed to post."""
    one, other = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[one, other])
    rank = hvd.rank()
    for process_set in (one, other):
        if process_set.included():
            x = torch.full((3,), float(rank), requires_grad=True)
            total = hvd.allreduce(x, op=hvd.Sum, process_set=process_set)
            total.sum().backward()
            assert total.tolist() == [sum(process_set.ranks)] * 3 and x.grad.tolist() == [2.0] * 3
    if rank == 0:
        with pytest.raises(ValueError, match="root rank"):
            hvd.broadcast(torch.ones(1), 77)
        with pytest.raises(ValueError, match="contiguous"):
            hvd.allgather(torch.ones(2, 2).t())
        not_posted()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
    assert hvd.broadcast(torch.tensor([rank]), 1).item() == 1
    assert hvd.allgather(torch.tensor([rank])).tolist() == [0, 1, 2]
    assert hvd.alltoall(torch.arange(3)).tolist() == [rank] * 3


def not_posted():
    """What only the core refuses, or a number that is too large for C."""
    x, huge = torch.ones(3), {"prescale_factor": 10**400}
    calls = [
        lambda: hvd.alltoall(torch.ones(4)),
        lambda: hvd.alltoall(torch.empty(2**32, 0), splits=[2**31, 0, 0]),
        lambda: hvd.allreduce(x, **huge), lambda: hvd.grouped_allreduce([x], **huge),
        lambda: hvd.reducescatter(x, **huge), lambda: hvd.grouped_reducescatter([x], **huge),
    ]
    for call in calls:
        for _ in range(2):
            next_one = repr(basics.runtime.unnamed[0])
            with pytest.raises(ValueError):
                call()
            assert repr(basics.runtime.unnamed[0]) == next_one


def disagreeing_sets():
    sets = [hvd.ProcessSet([0])] if os.environ["HOROVOD_RANK"] == "0" else []
    with pytest.raises(ValueError, match="Horovod initialization failed"):
        hvd.init(process_sets=sets)
    assert not hvd.is_initialized()


def dynamic_sets():
    if os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS"):
        hvd.init()
    hvd.init(process_sets="dynamic")
    hvd.init(process_sets="dynamic")
    rank = hvd.rank()
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched process sets: ranks 0 and 1 tried to add different"):
        hvd.add_process_set([rank])
    for _ in range(3):
        one = hvd.add_process_set([0, 1])
        other = hvd.add_process_set(hvd.ProcessSet([2, 1]))
        assert {one.process_set_id, other.process_set_id} == {1, 2}     # freed ids are reused
        with pytest.raises(ValueError, match="Attempted to add a duplicate process set"):
            hvd.add_process_set([1, 0])
        for process_set in (one, other):
            if process_set.included():
                total = hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum, name="t", process_set=process_set)
                assert total.item() == sum(process_set.ranks)
        assert hvd.remove_process_set(one) is True
        assert hvd.remove_process_set(one) is False
        assert hvd.remove_process_set(hvd.global_process_set) is False
        assert one.process_set_id is None
        with pytest.raises(ValueError):
            hvd.allreduce(torch.ones(1), process_set=one)
        if other.included():
            assert hvd.allgather(torch.tensor([rank]), process_set=other).tolist() == other.ranks
        assert hvd.remove_process_set(other) is True
        third = hvd.add_process_set([0, 2])         # with an id that was used before
        if third.included():
            assert hvd.allgather(torch.tensor([rank]), process_set=third).tolist() == third.ranks
        assert hvd.remove_process_set(third) is True
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3


def optimizers_in_a_freed_id():
    """Ranks that were in a removed set, and have optimizers in it, match the others in the next set with its id."""
    hvd.init(process_sets="dynamic")
    rank = hvd.rank()

    def optimizer_of(process_set):
        weight = torch.nn.Parameter(torch.ones(1))
        return weight, hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=process_set)

    def step(weight, optimizer, expected):
        with torch.no_grad():
            weight.fill_(1.0)
        optimizer.zero_grad()
        (weight * (rank + 1)).sum().backward()
        optimizer.step()
        assert weight.item() == 1 - expected

    one = hvd.add_process_set([0, 1])
    made = [optimizer_of(one) for _ in range(2)] if one.included() else []
    for each in made:
        step(*each, 1.5)
    id = one.process_set_id
    everywhere = optimizer_of(hvd.global_process_set)
    step(*everywhere, 2.0)
    assert hvd.remove_process_set(one)
    if made:
        with pytest.raises(ValueError, match="is not registered, or has been removed: pass it to"):
            step(*made[0], 1.5)
    assert everywhere[1].reducer.agreed       # the ranks need not agree again because of another set
    step(*everywhere, 2.0)
    other = hvd.add_process_set([0, 2])
    assert other.process_set_id == id
    if other.included():
        step(*optimizer_of(other), 2.0)
    assert hvd.remove_process_set(other)
    assert hvd.add_process_set(one) is one and one.process_set_id == id
    for each in [*([optimizer_of(one)] if made else []), *made]:      # a new one before the old ones
        step(*each, 1.5)


def test_optimizers_in_a_freed_id(run_ranks):
    run_ranks(3, optimizers_in_a_freed_id)


def joining():
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    for _epoch in range(2):
        # Rank r has r + 1 batches; joined ranks add zeros, and the average still divides by n.
        for batch in range(rank + 1):
            average = hvd.allreduce(torch.ones(3), name=f"batch.{batch}")
            assert torch.allclose(average, torch.full((3,), (n - batch) / n)), (batch, average)
        assert hvd.join() == n - 1
        # Also without a name, though the ranks have posted different numbers of operations.
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == n
    # Operations that do not work with join fail for their callers only.
    if rank == 0:
        assert hvd.join() in range(n)
    else:
        for word, call in (("Allgather", hvd.allgather), ("Alltoall", hvd.alltoall),
                           ("Reducescatter", hvd.reducescatter),
                           ("Broadcast", lambda tensor, name: hvd.broadcast(tensor, 1, name=name))):
            with pytest.raises(hvd.HorovodInternalError, match=f"{word} is not supported with Join at this time"):
                call(torch.ones(n), name="joined")
        hvd.join()
    assert hvd.allgather(torch.ones(1)).shape == (n,)


def test_static_sets(run_ranks):
    run_ranks(3, static_sets)


def test_unnamed_in_sets(run_ranks):
    run_ranks(3, unnamed_in_sets)


def test_disagreeing_sets(run_ranks):
    run_ranks(2, disagreeing_sets)


def test_dynamic_sets(run_ranks):
    run_ranks(3, dynamic_sets)
    run_ranks(3, dynamic_sets, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


@pytest.mark.parametrize("n", [2, 3])
def test_joining(run_ranks, n):
    run_ranks(n, joining)
