"""On a real GPU, which several ranks may share: every staged operation, and NCCL with one rank. Skipped, with the
reason, without a GPU. Expected: the same operation on the CPU, bit for bit; of training, that it works.
"""
import itertools

import numpy as np
import pytest

from bagua_hvd import algorithms
from device_arrays import missing_gpu

pytestmark = [pytest.mark.skipif(bool(missing_gpu()), reason=missing_gpu()), pytest.mark.timeout(300)]
RANKS = pytest.mark.parametrize("n", [1, 2, 4])
DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bfloat16", "bool"]


def _collectives(dtypes):
    import torch

    import bagua_hvd.torch as hvd

    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    for name, rows in itertools.product(dtypes, (0, 1, 257, 40_000)):
        dtype = getattr(torch, name)
        host = (torch.arange(rows * 3).reshape(rows, 3) * (hvd.rank() + 1) % 7 % 2).to(dtype)
        on_gpu = host.cuda()
        pairs = [(hvd.allgather(host), hvd.allgather(on_gpu)), (hvd.broadcast(host, 0), hvd.broadcast(on_gpu, 0))]
        splits = [rows // hvd.size()] * hvd.size()
        pairs.append((hvd.alltoall(host, splits)[0], hvd.alltoall(on_gpu, splits)[0]))
        if name not in ("uint8", "int8", "int16", "bool"):
            for op in (hvd.Sum, hvd.Min, hvd.Average):
                pairs.append((hvd.allreduce(host, op=op), hvd.allreduce(on_gpu, op=op)))
            pairs.append((hvd.reducescatter(host, op=hvd.Sum), hvd.reducescatter(on_gpu, op=hvd.Sum)))
            pairs += zip(hvd.grouped_allreduce([host] * 9), hvd.grouped_allreduce([on_gpu] * 9), strict=True)
        for expected, got in pairs:
            assert got.is_cuda and torch.equal(got.cpu(), expected), (name, rows)


@RANKS
def test_collectives(run_ranks, n):
    run_ranks(n, _collectives, arguments={"dtypes": DTYPES}, timeout=250)


def test_nccl_of_one_rank(run_ranks):
    """A communicator of size 1, as NCCL itself reports it, and all collectives of tensors by it."""
    (rank,) = run_ranks(1, _collectives, arguments={"dtypes": DTYPES}, timeout=250,
                        env={"NCCL_DEBUG": "INFO", "BAGUA_HVD_NCCL": "1"})
    print(rank.output)
    assert "NCCL INFO" in rank.output and "Init COMPLETE" in rank.output


def _streams_order_everything():
    """Only streams synchronize: kernels before and after, on a separate stream, in memory that is reused."""
    import torch

    import bagua_hvd.torch as hvd

    hvd.init()
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    with torch.cuda.stream(torch.cuda.Stream(device)):
        big = torch.randn(2000, 2000, device=device)
        sums = []
        for step in range(20):
            busy = big @ big
            x = torch.full((300_000,), float(step + hvd.rank()), device=device) + 0 * busy[0, 0]
            handle = hvd.allreduce_async(x, op=hvd.Sum, name=f"step.{step}")
            del x
            torch.randn(300_000, device=device)             # would reuse the memory of x
            sums.append(hvd.synchronize(handle).clone())
        torch.cuda.current_stream().synchronize()
    for step, values in enumerate(sums):
        assert (values == sum(step + rank for rank in range(hvd.size()))).all()


@RANKS
def test_streams_order_everything(run_ranks, n):
    run_ranks(n, _streams_order_everything, timeout=120)


def _train(names):
    import torch

    import bagua_hvd.torch as hvd

    hvd.init()
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    for name in names:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
        target = torch.randn(20, 1, generator=torch.Generator().manual_seed(4)).to(device)
        algorithm = algorithms.get(name)
        if isinstance(algorithm, algorithms.QAdam):
            optimizer = hvd.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=10)
        elif name == "onebit_adam":
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), algorithm=algorithm)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        losses = []
        for step in range(60):
            inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(100 * step + hvd.rank())).to(device)
            optimizer.zero_grad()
            loss = (model(inputs) - inputs @ target).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        hvd.barrier()
        assert sum(losses[-5:]) < sum(losses[:5]), (name, losses)
        del optimizer


@pytest.mark.parametrize("n", [2, 4])
def test_algorithms(run_ranks, n):
    run_ranks(n, _train, arguments={"names": list(algorithms.names())}, timeout=280)


def _low_precision(device):
    """The codecs with kernels, several steps of C_LP_S with error feedback and of D_LP_S: tensors of `device` against
    those of the host.
    """
    import torch

    import bagua_hvd.torch as hvd
    from bagua_hvd import primitives
    from bagua_hvd.core import native
    from bagua_hvd.torch.frontend import frontend

    hvd.init()
    if device == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

    def step(kind, tensors, state, codec, name, seed):
        views = [frontend.view(tensor, tensor) for tensor in tensors]
        fields = state.fields() if kind == native.C_LP_S else state.fields(sum(tensor.numel() for tensor in tensors))
        if kind == native.D_LP_S:
            fields.update(before=(-1, 0.25, 0), after=(0.5, 1, 0, 0.25))
        hvd.mpi_ops.basics.context().post(
            kind, name, views, op=native.OP_AVERAGE, owner=state,
            codec=codec.number, codec_options={"parameter": codec.parameter, "seed": seed}, **fields).wait()

    codecs = [primitives.minmax_uint8, primitives.sign, primitives.sign_rms, primitives.rotated()]
    for (i, codec), dtype, sizes in itertools.product(enumerate(codecs), (torch.float32, torch.float16, torch.bfloat16),
                                                      ((7, 1000, 1), (1_200_000,))):
        kept, expected = (primitives.ErrorState(sum(sizes), hvd.size()) for _ in range(2))
        replicas, known = (primitives.Replicas(*np.zeros((3, sum(sizes)), np.float32)) for _ in range(2))
        for seed in range(3):
            generator = torch.Generator().manual_seed(10 * seed + hvd.rank())
            host = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
            there = [tensor.to(device, copy=True) for tensor in host]
            step(native.D_LP_S, there, replicas, codec, f"there.replicas.{i}", seed)
            step(native.D_LP_S, host, known, codec, f"host.replicas.{i}", seed)
            step(native.C_LP_S, there, kept, codec, f"there.{i}", seed)
            step(native.C_LP_S, host, expected, codec, f"host.{i}", seed)
            for got, wanted in zip(there, host, strict=True):
                assert torch.equal(got.cpu().view(torch.uint8), wanted.view(torch.uint8)), (i, dtype, sizes, seed)
        assert (kept.worker == expected.worker).all() and (kept.server == expected.server).all()
        assert replicas.state_dict() == known.state_dict()


@RANKS
def test_low_precision(run_ranks, n):
    run_ranks(n, _low_precision, arguments={"device": "cuda"}, timeout=280)


def test_low_precision_by_nccl_of_one_rank(run_ranks):
    run_ranks(1, _low_precision, arguments={"device": "cuda"}, timeout=280, env={"BAGUA_HVD_NCCL": "1"})


def _mixed():
    import torch

    import bagua_hvd.torch as hvd

    hvd.init()
    with pytest.raises(hvd.HorovodInternalError, match="CPU/GPU device selection"):
        hvd.allreduce(torch.ones(3, device="cuda" if hvd.rank() else "cpu"), name="mixed")


def test_a_rank_on_the_cpu_is_an_error_on_all(run_ranks):
    run_ranks(2, _mixed)


def _group_of_c10d(file):
    """Results that the core allocates, or writes to GPU tensors, from a separate stream."""
    import torch
    import torch.distributed as dist

    import bagua_hvd.torch as hvd
    import bagua_hvd.torch.distributed  # noqa: F401  (makes the backend known where the package was not installed)

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    dist.init_process_group("bagua", init_method=f"file://{file}", rank=rank, world_size=size)
    ranks = torch.arange(size, dtype=torch.float32, device="cuda")
    for count in (3, 40_000):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(50_000_000)
            mine, whole = torch.full((count,), float(rank), device="cuda"), torch.empty(size * count, device="cuda")
            dist.all_gather_into_tensor(whole, mine)
            assert torch.equal(whole, ranks.repeat_interleave(count))
            parts = [torch.empty(count, device="cuda") for _ in range(size)]
            dist.gather(mine, parts if rank == 0 else None)
            assert rank or torch.equal(torch.cat(parts), whole)
            dist.scatter(mine, list((whole + 1).split(count)) if rank == 0 else None)
            assert (mine == rank + 1).all()
            dist.all_to_all_single(torch.empty_like(whole), whole)
            uneven = [torch.empty(i + 1, device="cuda") for i in range(size)]
            dist.all_gather(uneven, torch.full((rank + 1,), float(rank), device="cuda"))
            assert all((part == i).all() for i, part in enumerate(uneven))
            received = torch.empty(count, device="cuda")
            sent = dist.isend(torch.full((count,), 7.0 + rank, device="cuda"), (rank + 1) % size)
            dist.recv(received, (rank - 1) % size)
            sent.wait()
            assert (received == 7 + (rank - 1) % size).all()
            work = dist.all_gather(parts, mine, async_op=True)
        while not work.is_completed():      # its copies are on this stream
            pass
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work.wait()
            assert torch.equal(torch.cat(parts), (whole + 1))
    dist.destroy_process_group()


@pytest.mark.parametrize("n", [2, 4])
def test_a_group_of_c10d(run_ranks, n, tmp_path):
    run_ranks(n, _group_of_c10d, arguments={"file": str(tmp_path / "store")}, timeout=120)


def _streams_of_an_optimizer():
    """A part of the model runs on another stream, so its gradient is late; the averages do not change."""
    import torch

    import bagua_hvd.torch as hvd

    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

    def train(side):
        torch.manual_seed(0)
        first, second = (torch.nn.Linear(50, 50).cuda() for _ in range(2))
        model = torch.nn.ModuleList([first, second])
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        if side is not None:
            first.weight.register_hook(lambda g: (torch.cuda._sleep(200_000_000), g * 1)[1])
        gradients = []
        for step in range(3):
            inputs = torch.randn(8, 50, generator=torch.Generator().manual_seed(10 * step + hvd.rank())).cuda()
            main = torch.cuda.current_stream()
            with torch.cuda.stream(side or main):
                torch.cuda.current_stream().wait_stream(main)
                hidden = first(inputs)
            main.wait_stream(side or main)
            second(hidden).pow(2).mean().backward()
            gradients += [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return gradients

    for expected, got in zip(train(None), train(torch.cuda.Stream()), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("n", [2])
def test_streams_of_an_optimizer(run_ranks, n):
    run_ranks(n, _streams_of_an_optimizer, timeout=120)


def _shutdown_while_the_gpu_is_behind():
    import torch

    import bagua_hvd.torch as hvd

    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    hvd.allreduce(torch.ones(1000, device="cuda"))
    tensor = torch.ones(1000, device="cuda")
    torch.cuda._sleep(2_000_000_000)
    handle = hvd.allreduce_async(tensor, name="late")
    hvd.shutdown()
    try:
        hvd.synchronize(handle)
    except hvd.HorovodInternalError as error:
        print("failed:", error)
    torch.cuda.synchronize()


@pytest.mark.parametrize("n", [2])
def test_shutdown_while_the_gpu_is_behind(run_ranks, n):
    """Shutdown returns, and posted operations succeed or fail."""
    run_ranks(n, _shutdown_while_the_gpu_is_behind, timeout=60)
