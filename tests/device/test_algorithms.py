"""Every algorithm, with parameters and gradients on a device, trains the same weights as on the CPU.

No GPU is used. PyTorch's CPU tensors pose as tensors of the fake GPU (fake_cuda.c): the core and the algorithms get
addresses that only the fake's copies can resolve, so code that reads a GPU tensor on the host crashes. Expected: the
same bits as in host memory.
"""
import pytest

from bagua_hvd import algorithms

ASYNC = [name for name in algorithms.names() if name.startswith("async")]    # their runs are never equal
ARGUMENTS = {"powersgd": {"rank": 1, "warmup_steps": 1}, "diloco": {"communication_interval": 2},
             "local_sgd": {"communication_interval": 2}, **{name: {"sync_interval_ms": 0} for name in ASYNC}}
STEPS = 4


def _pose_as_device_tensors(device=None):
    """Makes PyTorch's tensors appear on the fake GPU; device: None for the one that all ranks share."""
    from bagua_hvd.core.native import TensorView
    from bagua_hvd.core.operations import Operation
    from bagua_hvd.torch.frontend import TorchFrontend
    from device_arrays import TAG, FakePlacement

    placement = FakePlacement(device)
    placement.adopt = lambda tensor: tensor
    on_host = TorchFrontend.view

    def view(self, tensor, output=None):
        src, dst, shape, dtype, owner, *_ = on_host(self, tensor, output)
        return TensorView(src | TAG, dst | TAG if dst else 0, shape, dtype, owner, placement)

    def synchronizing(method):
        def call(*arguments):
            result = method(*arguments)
            placement.cuda.synchronize(placement.current)       # PyTorch's operations do not use the stream
            return result
        return call

    Operation.wait, Operation.copy_result = synchronizing(Operation.wait), synchronizing(Operation.copy_result)
    TorchFrontend.view = view


def _train(poses, names):
    import torch

    import bagua_hvd.torch as hvd

    if poses:
        _pose_as_device_tensors()
    hvd.init()
    for name in names:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3).to(torch.float32))
        algorithm = algorithms.get(name, **ARGUMENTS.get(name, {}))
        if isinstance(algorithm, algorithms.QAdam):
            optimizer = hvd.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
        elif algorithm.uses_adam:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), algorithm=algorithm)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for step in range(STEPS):
            inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
            optimizer.zero_grad()
            model(inputs).pow(2).mean().backward()
            optimizer.step()
        hvd.barrier()
        if name in ASYNC:
            assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
            print(name, "finite")
        else:
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
            print(name, flat.numpy().tobytes().hex())
        del optimizer
    if poses:
        from device_arrays import fake_cuda

        print("copies", fake_cuda().copies())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [2])
def test_algorithms_train_the_same_weights(run_ranks, n):
    names = list(algorithms.names())
    host, device = ([rank.output.splitlines() for rank in
                     run_ranks(n, _train, arguments={"poses": poses, "names": names}, timeout=250)]
                    for poses in (False, True))
    for rank in range(n):
        assert [line.split()[0] for line in host[rank]] == names
        *device_lines, copies = device[rank]
        assert device_lines == host[rank]
        assert int(copies.split()[1]) > 2 * STEPS * len(names)


def _train_an_embedding(poses):
    import torch

    import bagua_hvd.torch as hvd

    if poses:
        from device_arrays import own_device

        _pose_as_device_tensors(own_device(0))
    hvd.init()
    torch.manual_seed(3)
    model = torch.nn.Embedding(9, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(STEPS):
        optimizer.zero_grad()
        # As many entries as the rank has; in the last step rank 0 has none.
        rows = [] if step == STEPS - 1 and hvd.rank() == 0 else [step, *range(4, 5 + hvd.rank())]
        model(torch.tensor(rows, dtype=torch.int64)).pow(2).sum().backward()
        optimizer.step()
    assert model.weight.grad.is_sparse
    print(model.weight.detach().numpy().tobytes().hex())
    if poses:
        from device_arrays import fake_cuda

        assert fake_cuda().nccl_groups() > STEPS


@pytest.mark.long
def test_sparse_gradients_over_nccl(run_ranks):
    """Each rank has its own GPU, so the core leaves the gathered entries there."""
    n = 3
    host = run_ranks(n, _train_an_embedding, arguments={"poses": False})
    own_gpus = [{"BHVD_FAKE_CUDA_UUID": f"gpu{rank}"} for rank in range(n)]
    device = run_ranks(n, _train_an_embedding, arguments={"poses": True}, env=own_gpus)
    assert [rank.output for rank in device] == [rank.output for rank in host]
