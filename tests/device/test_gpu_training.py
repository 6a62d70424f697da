"""Training on a real GPU: mixed precision, Adam's variants, checkpoints, DDP, FSDP2, captured graphs.

Skipped, with the reason, without a GPU.
"""
import pytest

from device_arrays import missing_gpu

pytestmark = [pytest.mark.skipif(bool(missing_gpu()), reason=missing_gpu()), pytest.mark.timeout(300)]
RANKS = pytest.mark.parametrize("n", [1, 2])
SAME_ON_ALL = ("gradient_allreduce", "bytegrad", "rotated", "powersgd", "topk", "onebit_adam")


class _Regression:
    """A perceptron that learns a linear function, with different batches on every rank."""

    def __init__(self):
        import torch

        torch.manual_seed(0)
        layers = [torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1)).cuda()
        self.target = torch.randn(20, 1, generator=torch.Generator().manual_seed(4)).cuda()

    def loss(self, step, rank, model=None):
        import torch

        inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(100 * step + rank)).cuda()
        return ((model or self.model)(inputs) - inputs @ self.target).float().pow(2).mean()


def _optimizer(kind, parameters):
    import torch

    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.Adam(parameters, lr=0.01, **({kind: True} if kind != "adam" else {}))


def _mixed_precision(cases):
    import torch

    import bagua_hvd.torch as hvd

    hvd.init()
    for algorithm, kind, type in cases:
        task = _Regression()
        optimizer = hvd.DistributedOptimizer(_optimizer(kind, task.model.parameters()), task.model.named_parameters(),
                                             algorithm=algorithm)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**15, enabled=type == "float16")
        losses = []
        for step in range(60):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=getattr(torch, type)):
                loss = task.loss(step, hvd.rank())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), 5.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        if optimizer.algorithm.asynchronous:
            optimizer.algorithm.abort()
        assert sum(losses[-5:]) < sum(losses[:5]), (algorithm, kind, type, losses)
        for parameter in task.model.parameters():
            flat = hvd.allgather(parameter.detach().reshape(1, -1))
            assert algorithm not in SAME_ON_ALL or (flat == flat[0]).all(), (algorithm, kind, type)


@RANKS
def test_mixed_precision(run_ranks, n):
    cases = [(algorithm, "sgd", type) for type in ("float16", "bfloat16")
             for algorithm in ("gradient_allreduce", "bytegrad", "rotated", "powersgd", "topk", "diloco", "async")]
    run_ranks(n, _mixed_precision, arguments={"cases": cases}, timeout=200)


@RANKS
def test_variants_of_adam(run_ranks, n):
    cases = [(algorithm, kind, "bfloat16") for kind in ("adam", "foreach", "capturable", "fused")
             for algorithm in ("gradient_allreduce", "onebit_adam", "rotated", "local_sgd", "diloco", "powersgd")
             if (algorithm, kind) != ("onebit_adam", "fused")]      # an error
    run_ranks(n, _mixed_precision, arguments={"cases": cases}, timeout=200)


def _resumed(cases):
    """Twelve steps give the same weights as six, a checkpoint, and six more."""
    import io

    import torch

    import bagua_hvd.torch as hvd

    hvd.init()

    def begin(algorithm, kind):
        task = _Regression()
        return task, hvd.DistributedOptimizer(_optimizer(kind, task.model.parameters()), task.model.named_parameters(),
                                              algorithm=algorithm)

    def train(task, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            task.loss(step, hvd.rank()).backward()
            optimizer.step()

    for algorithm, kind in cases:
        whole, optimizer = begin(algorithm, kind)
        train(whole, optimizer, range(12))
        half, optimizer = begin(algorithm, kind)
        train(half, optimizer, range(6))
        file = io.BytesIO()
        torch.save((half.model.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        model, state = torch.load(file, map_location="cuda", weights_only=False)
        rest, optimizer = begin(algorithm, kind)
        rest.model.load_state_dict(model)
        optimizer.load_state_dict(state)
        train(rest, optimizer, range(6, 12))
        for one, other in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, msg=f"{algorithm}, {kind}")


@RANKS
def test_checkpoints(run_ranks, n):
    cases = [(algorithm, kind) for kind in ("sgd", "capturable")
             for algorithm in ("gradient_allreduce", "bytegrad", "powersgd", "topk", "diloco")]
    run_ranks(n, _resumed, arguments={"cases": [*cases, ("onebit_adam", "adam")]}, timeout=200)


def _wrapped_by_torch(file):
    """DDP and FSDP2 over backend "bagua" give the weights of one process with all batches."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import bagua_hvd.torch as hvd
    import bagua_hvd.torch.distributed  # noqa: F401  (makes the backend known where the package was not installed)

    hvd.init()
    torch.cuda.set_device(0)
    dist.init_process_group("bagua", init_method=f"file://{file}", rank=hvd.rank(), world_size=hvd.size())

    def train(wrap, ranks):
        task = _Regression()
        wrapped = wrap(task.model)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.05)
        for step in range(6):
            optimizer.zero_grad()
            for rank in ranks:
                (task.loss(step, rank, wrapped) / len(ranks)).backward()
            optimizer.step()
        return [getattr(parameter, "full_tensor", lambda p=parameter: p)() for parameter in task.model.parameters()]

    def shard(model):
        for layer in model[::2]:
            fully_shard(layer)
        return fully_shard(model)

    expected = train(lambda model: model, range(hvd.size()))
    for wrap in (torch.nn.parallel.DistributedDataParallel, shard):
        for one, other in zip(train(wrap, [hvd.rank()]), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


@RANKS
def test_wrapped_by_torch(run_ranks, n, tmp_path):
    run_ranks(n, _wrapped_by_torch, arguments={"file": str(tmp_path / "store")}, timeout=120)


def _captures_beside():
    """Another thread may capture graphs while operations run."""
    import threading

    import torch

    import bagua_hvd.torch as hvd

    hvd.init()
    x, failures = torch.ones(1000, device="cuda"), []

    def reduce():
        try:
            for _ in range(60):
                assert (hvd.allreduce(x, name="beside", op=hvd.Sum) == hvd.size()).all()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=reduce)
    thread.start()
    source = torch.zeros(1000, device="cuda")
    for _ in range(5):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = source * 2 + 1
        graph.replay()
    thread.join()
    assert not failures, failures
    torch.cuda.synchronize()
    assert (result == 1).all()


@RANKS
def test_captures_beside(run_ranks, n):
    run_ranks(n, _captures_beside, timeout=100)
