"""Everything around the operations: groups of some ranks, works and futures, timeouts, rejected calls, the start."""
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms, codecs
from bagua_hvd.algorithms import PowerSGD
from bagua_hvd.torch.distributed import Options, ProcessGroup, process_set_of
from torch_group import start
from two_phases import TwoPhases


def summed(value, group=None, count=3):
    tensor = torch.full((count,), float(value))
    dist.all_reduce(tensor, group=group)
    assert (tensor == tensor[0]).all()
    return tensor[0].item()


def groups(file):
    rank, size = start(file)
    assert dist.get_backend() == "bagua" and (dist.get_rank(), dist.get_world_size()) == (rank, size)
    assert hvd.is_initialized() and (hvd.rank(), hvd.size()) == (rank, size)
    with pytest.raises(ValueError, match='perhaps by init_process_group."bagua".*to the first call'):
        hvd.init(process_sets="dynamic")
    # Only their members create them, in any order.
    if rank != 1:
        ends = dist.new_group([0, 3], use_local_synchronization=True) if rank in (0, 3) else None
        assert ends is None or summed(rank, ends) == 3
    dist.barrier()
    early = dist.isend(torch.ones(2), 1) if rank == 0 else None     # creates the set of both, as new_group does
    pairs = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (1, 2), (2, 3), (0, 3))}
    mine = [pair for pair in pairs if rank in pair]
    for pair in mine if rank % 2 else reversed(mine):
        assert summed(rank, pairs[pair]) == sum(pair)
    if rank == 1:
        dist.recv(torch.empty(2), 0)
    assert early is None or early.wait() is not False
    again = dist.new_group([1, 2, 3])
    if rank:
        assert process_set_of(again).ranks == [1, 2, 3] and dist.get_group_rank(again, rank) == rank - 1
        ours = process_set_of(again)
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=ours)[0] == 3
        net = torch.nn.Linear(2, 2)
        hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), process_set=ours)
        tensor = torch.full((2,), float(rank))
        dist.broadcast(tensor, 2, group=again)
        assert (tensor == 2).all()
    backwards = dist.distributed_c10d._new_group_with_tag([3, 1, 2], sort_ranks=False)
    if rank:
        in_another_order(rank, backwards)
    assert summed(rank, dist.new_group()) == sum(range(size))
    dist.destroy_process_group(again)
    part = dist.group.WORLD.split_group([2, 0]) if rank in (0, 2) else None
    assert part is None or (part.rank(), part.size(), part.group_name) == (1 - rank // 2, 2, "split.2_0")
    if part is not None:
        tensor = torch.full((2,), float(rank))
        part.broadcast([tensor], _options(dist.BroadcastOptions(), rootRank=0)).wait()
        assert (tensor == 2).all()
    dist.barrier()
    dist.destroy_process_group()
    assert not hvd.is_initialized()


def _options(options, **values):
    for name, value in values.items():
        setattr(options, name, value)
    return options


def in_another_order(rank, group):
    """The group has the job's ranks in the order 3, 1, 2; its process set has 1, 2, 3."""
    order = [3, 1, 2]
    mine = order.index(rank)
    assert dist.get_rank(group) == mine
    gathered = torch.empty(3, 2)
    dist.all_gather_single(gathered, torch.full((2,), float(rank)), group=group)
    assert gathered[:, 0].tolist() == order
    parts = [torch.empty(2) for _ in order]
    dist.all_gather(parts, torch.full((2,), float(rank)), group=group)
    assert [part[0] for part in parts] == order
    parts = [torch.empty(1) for _ in order] if mine == 0 else None
    dist.gather(torch.tensor([float(rank)]), parts, group=group, group_dst=0)
    assert parts is None or [part.item() for part in parts] == order
    output = torch.empty(1)
    dist.scatter(output, [torch.tensor([float(i)]) for i in range(3)] if mine == 1 else None, group=group, group_src=1)
    assert output.item() == mine
    dist.reduce_scatter_single(output, torch.arange(3.0), group=group)
    assert output.item() == 3 * mine
    received = torch.empty(3)
    dist.all_to_all_single(received, torch.arange(3.0) + 10 * mine, group=group)
    assert received.tolist() == [mine, 10 + mine, 20 + mine]
    got = torch.empty(1)
    requests = [dist.isend(torch.tensor([float(mine)]), group=group, group_dst=(mine + 1) % 3),
                dist.irecv(got, group=group, group_src=(mine - 1) % 3)]
    assert all(request.wait() for request in requests) and got.item() == (mine - 1) % 3


def works(file):
    rank, size = start(file)
    gate = torch.ones(1)
    # A future completes independently of others: rank 0's peer in the first is late, the one in the second is not.
    slow, quick = torch.full((4,), float(rank)), torch.full((4,), float(rank))
    side = dist.new_group()
    ended = threading.Event()
    if rank == 0:
        first = dist.all_reduce(slow, async_op=True)
        second = dist.all_reduce(quick, group=side, async_op=True)
        assert isinstance(first, dist.Work)
        then = second.get_future().then(lambda future: (ended.set(), future.value()[0].sum().item())[1])
        assert first.get_future() is first.get_future()
        assert then.wait() == 4 * sum(range(size)) and ended.is_set()
        assert second.is_completed() and second.is_success() and second.exception() is None
        assert not first.is_completed() and not first.get_future().done()
        dist.broadcast(gate, 0, group=side)
        assert first.get_future().wait()[0] is slow and first.result()[0] is slow
        assert first.wait() and (slow == sum(range(size))).all()
    else:
        dist.all_reduce(quick, group=side)
        dist.broadcast(gate, 0, group=side)
        dist.all_reduce(slow)
    disagreeing(rank, size)
    dist.barrier()
    group = dist.group.WORLD
    number = group._get_sequence_number_for_group()
    work = dist.barrier(async_op=True)
    work.wait(timedelta(seconds=20))
    assert number > 0 and group._get_sequence_number_for_group() == number + 1
    dist.destroy_process_group()


def coalesced(file):
    """The work of _coalescing_manager() is complete when all its operations are; the last rank is late."""
    rank, size = start(file)
    device = torch.device("cpu")

    def begin():
        tensors = [torch.full((1000,), rank + 1.0) for _ in range(3)]
        if rank:
            time.sleep(0.3)
        with dist._coalescing_manager(device=device, async_ops=True) as manager:
            group = dist.group.WORLD
            group.allreduce([tensors[0]])
            group.broadcast([tensors[1]], _options(dist.BroadcastOptions(), rootRank=1))
            dist.all_reduce(tensors[2])
        return manager, tensors

    def ended(tensors):
        return [tensor[0].item() for tensor in tensors] == [3, 2, 3]

    manager, tensors = begin()
    manager.wait()
    assert ended(tensors)
    manager, tensors = begin()
    [work] = manager.works
    assert all(given is tensor for given, tensor in zip(work.get_future().wait(), tensors, strict=True))
    assert work.is_completed() and ended(tensors)
    manager, tensors = begin()
    [work] = manager.works
    while not work.is_completed():
        time.sleep(0.01)
    assert ended(tensors)
    for fails in (False, True):
        tensors = [torch.full((1000 + rank * fails,), rank + 1.0) for _ in range(2)]
        with pytest.raises(RuntimeError, match="Mismatched") if fails else nullcontext():
            with dist._coalescing_manager(device=device):
                for tensor in tensors:
                    dist.all_reduce(tensor)
            assert (tensors[1] == 3).all()
    dist.destroy_process_group()


def disagreeing(rank, size):
    """Both ranks get both shapes, by wait() and by the future, and the group continues."""
    work = dist.all_reduce(torch.zeros(2 + rank), async_op=True)
    with pytest.raises(RuntimeError, match="Mismatched ALLREDUCE tensor shapes"):
        work.get_future().wait()
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
        work.wait()
    assert not work.is_success() and isinstance(work.exception(), hvd.HorovodInternalError)
    for call in (lambda: dist.all_gather_single(torch.empty(size * (2 + rank)), torch.zeros(2 + rank)),
                 lambda: dist.broadcast(torch.zeros(2, 2 + rank), 0)):
        with pytest.raises(RuntimeError, match="Mismatched"):
            call()
    with pytest.raises(RuntimeError, match="Mismatched collective operations|Mismatched .*operation"):
        dist.all_reduce(torch.zeros(2)) if rank else dist.broadcast(torch.zeros(2), 0)
    assert summed(rank) == sum(range(size))
    with pytest.raises(ValueError, match="2 ranks give 6 elements of torch.float32, but the output holds 5"):
        dist.all_gather_single(torch.empty(5), torch.zeros(3))


def timeouts(file):
    rank, size = start(file, seconds=30)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"all_reduce number \d+ of a group of 2 ranks: Timed out waiting 0.3 s"):
            dist.all_reduce(torch.zeros(2), async_op=True).wait(timedelta(seconds=0.3))
        with pytest.raises(RuntimeError, match="recv from rank 1 with tag 7: Timed out"):
            dist.irecv(torch.zeros(2), 1, tag=7).wait(timedelta(seconds=0.2))
        store.set("rank 0 has given up", "")
    else:
        store.wait(["rank 0 has given up"])
        dist.all_reduce(torch.zeros(2))         # the operation that it gave up completes now
    short = dist.new_group(timeout=timedelta(seconds=0.3))
    if rank == 0:
        with pytest.raises(RuntimeError, match="Timed out waiting 0.3 s"):
            dist.barrier(group=short)
        dist.barrier()
    else:
        dist.barrier()
        dist.barrier(group=short)
    dist.barrier(async_op=True).wait(timedelta(seconds=20))
    dist.destroy_process_group()


def options(file):
    rank, size = start(file, pg_options=Options(algorithm="bytegrad", min_bytes=1 << 10))
    large, small = torch.linspace(rank, rank + 1, 1 << 12), torch.linspace(rank, rank + 1, 16)
    for op, expected in ((dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.AVG, 1 / size)):
        reduced = [tensor.clone() for tensor in (large, small)]
        for tensor in reduced:
            dist.all_reduce(tensor, op)
        exact = [expected * (size * torch.linspace(0, 1, len(tensor)) + sum(range(size))) for tensor in reduced]
        assert torch.allclose(reduced[1], exact[1])
        assert 0 < (reduced[0] - exact[0]).abs().max() < 0.02 * size
    tensor = large.clone()
    dist.reduce(tensor, 1)              # in full precision on all ranks
    assert torch.allclose(tensor, size * torch.linspace(0, 1, 1 << 12) + sum(range(size)) if rank == 1 else large)
    counts = torch.full((1 << 12,), rank)
    dist.all_reduce(counts)
    assert (counts == sum(range(size))).all()
    for relaxed in (Options(algorithm=algorithms.ByteGrad(average=False)), Options(codec=codecs.minmax_uint8)):
        group = dist.new_group(pg_options=relaxed)
        for op, expected in ((dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.AVG, 1 / size),
                             (dist._make_nccl_premul_sum(0.5), 0.5)):
            total, ones = size * (size + 1) / 2, torch.ones(1 << 15) * (rank + 1)
            dist.all_reduce(ones, op, group=group)
            assert torch.allclose(ones, torch.full_like(ones, expected * total), rtol=0.01), (relaxed, op)
    seeded = algorithms.ByteGrad(codec=codecs.block(4, stochastic=True))
    numbered = dist.new_group(pg_options=Options(algorithm=seeded, min_bytes=0))
    draws = []
    for _ in range(16):         # different random numbers each time, so that errors average out
        draws.append(large.clone())
        dist.all_reduce(draws[-1], dist.ReduceOp.AVG, group=numbered)
    mean = torch.stack(draws).mean(0)
    exact = torch.linspace(0, 1, len(large)) + sum(range(size)) / size
    assert (mean - exact).norm() < 0.5 * (draws[0] - exact).norm()
    with pytest.warns(UserWarning, match="apply to all_reduce only: reduce_scatter and all_gather"):
        dist.reduce_scatter_single(torch.empty(4), torch.ones(4 * size), group=numbered)
    for name in algorithms.names():
        if name in ("gradient_allreduce", "bytegrad", "rotated"):
            Options(algorithm=name)
        else:
            with pytest.raises(ValueError, match="does more than communicate gradients|keeps errors between steps"):
                Options(algorithm=name)
    exact = dist.new_group(pg_options=Options())
    tensor = large.clone()
    dist.all_reduce(tensor, group=exact)
    assert torch.allclose(tensor, size * torch.linspace(0, 1, 1 << 12) + sum(range(size)))
    phases = dist.new_group(pg_options=Options(algorithm=TwoPhases, min_bytes=0))
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0])
    for wait in (dist.Work.wait, lambda work: work.get_future().wait()):
        reduced = signs.clone()
        wait(dist.all_reduce(reduced, group=phases, async_op=True))
        assert torch.equal(reduced, size * signs)
    for algorithm in ("doublesqueeze", PowerSGD(warmup_steps=0)):
        with pytest.raises(ValueError, match="keeps errors between steps, and all_reduce does not know"):
            Options(algorithm=algorithm)
    with pytest.raises(ValueError, match="an algorithm or a codec, not both"):
        Options(algorithm="bytegrad", codec=object())
    with pytest.raises(ValueError, match="are bagua_hvd.torch.distributed.Options, not"):
        dist.new_group(pg_options={"algorithm": "bytegrad"})
    dist.destroy_process_group()


def under_gloo(file):
    """With a gloo group first, hvd.init() finds the ranks through it, and a group of ours works beside it."""
    with pytest.raises(ValueError, match=r"call init_process_group\(\) first"):
        process_set_of()
    rank, size = start(file, backend="gloo")
    assert process_set_of() is hvd.global_process_set and (hvd.rank(), hvd.size()) == (rank, size)
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)
    assert hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum).item() == sum(range(size))
    ours = dist.new_group(backend="bagua")
    assert dist.get_backend(ours) == "bagua" and summed(rank, ours) == summed(rank) == sum(range(size))
    dist.destroy_process_group()
    assert hvd.is_initialized()             # by the user's own call
    hvd.shutdown()
    start_again(file, rank, size)


def beside_gloo(file):
    """Another backend serves the tensors of its device, here the CPU."""
    rank, size = start(file, backend="cpu:gloo,cuda:bagua")
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroup) and not isinstance(group._get_backend(torch.device("cpu")), ProcessGroup)
    assert summed(rank) == sum(range(size))
    number = group._get_sequence_number_for_group()
    parts = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((2,), float(rank)), parts, 0)
    assert parts is None or [part[0].item() for part in parts] == list(range(size))
    tensor = torch.full((2,), float(rank))
    if rank == 0:
        assert dist.recv(tensor) == 1 and (tensor == 1).all()
    else:
        dist.send(tensor, 0)
    lists = [[torch.empty(2)] for _ in range(size)]
    group.allgather_coalesced(lists, [torch.full((2,), float(rank))]).wait()
    assert [tensor[0].item() for [tensor] in lists] == list(range(size))
    assert group._get_sequence_number_for_group() == number
    called, others = [], group._others
    group._others = {"gloo": SimpleNamespace(_allgather_base=lambda *_: called.append("_allgather_base"))}
    group._allgather_base(torch.empty(size), torch.ones(1))
    group._others = others
    assert called == ["_allgather_base"]        # older versions of torch have only the names that they call
    dist.destroy_process_group()


def removed_sets(file):
    """A group and point-to-point messages keep their process set when the user removes a set of the same ranks."""
    rank, size = start(file, backend="gloo")
    hvd.init(process_sets="dynamic")
    everyone = dist.new_group(backend="bagua")

    def message():
        tensor = torch.full((2,), float(rank))
        if rank == 0:
            dist.send(tensor, 1, group=everyone)
        elif rank == 1:
            dist.recv(tensor, 0, group=everyone)
            assert (tensor == 0).all()

    before = hvd.add_process_set([0, 1])
    group = dist.new_group([0, 1], backend="bagua")
    after = dist.new_group([1, 2], backend="bagua")
    late = hvd.add_process_set([1, 2])
    message()
    for process_set, pair in ((before, group), (late, after)):
        members = process_set.ranks
        assert rank not in members or summed(rank, pair) == sum(members)
        assert rank not in members or hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=process_set) == 2
        if rank in members:
            assert hvd.remove_process_set(process_set_of(pair)) is False
        assert hvd.remove_process_set(process_set) is True
        assert rank not in members or summed(rank, pair) == sum(members)
        message()
    hvd.add_process_set([0, 2])             # which may reuse a free id
    assert rank == 2 or summed(rank, group) == 1
    message()
    dist.destroy_process_group()
    hvd.shutdown()


def start_again(file, rank, size):
    dist.init_process_group("cpu:bagua", init_method=f"file://{file}.2", rank=size - 1 - rank, world_size=size)
    assert hvd.rank() == dist.get_rank() == size - 1 - rank
    with pytest.raises(ValueError, match="trying to initialize the default process group twice"):
        dist.init_process_group("bagua")
    assert summed(rank) == sum(range(size))
    dist.destroy_process_group()


def under_baguarun(file):
    """The launcher's variables define the job; torch.distributed must use the same ranks."""
    import os

    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    with pytest.raises(ValueError, match=f"rank {size - 1 - rank} of {size} to torch.distributed, but rank {rank} of"):
        dist.init_process_group("bagua", init_method=f"file://{file}.1", rank=size - 1 - rank, world_size=size)
    hvd.init()
    dist.init_process_group("bagua", init_method=f"file://{file}.2", rank=rank, world_size=size)
    assert summed(rank) == sum(range(size))
    dist.destroy_process_group()
    assert hvd.is_initialized() and hvd.allreduce(torch.ones(1)).item() == 1
    hvd.shutdown()
    for name in "34":       # hvd.init() after the group, too; shutdown() ends that
        dist.init_process_group("bagua", init_method=f"file://{file}.{name}", rank=rank, world_size=size)
        if name == "3":
            hvd.init()
        dist.destroy_process_group()
        assert hvd.is_initialized() == (name == "3")
        hvd.shutdown()


def test_groups_of_four_ranks(run_group):
    run_group(4, groups)


def test_three_ranks(run_group):
    run_group(3, removed_sets)


@pytest.mark.parametrize("function", [works, coalesced, timeouts, options, beside_gloo, under_gloo, under_baguarun])
def test_two_ranks(run_group, function):
    run_group(2, function)


@pytest.mark.skipif(torch.__version__ < "2.5", reason="torch before 2.5 loads no entry points")
def test_torch_knows_the_backend_by_itself():
    """None of our modules is imported, and only the registration is loaded before a group exists."""
    code = """
import sys
import torch
import torch.distributed as dist
assert "BAGUA" in dist.Backend._plugins, "reinstall the package: its entry point torch.backends is missing"
assert not [name for name in sys.modules if name.startswith(("bagua_hvd.torch", "bagua_hvd.job"))]
dist.init_process_group("bagua", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
assert tensor.tolist() == [1, 1]
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
