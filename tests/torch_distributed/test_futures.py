"""Callbacks at the end of an operation may take long, wait for other operations, and fail."""
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bagua_hvd.core.operations import Ended
from bagua_hvd.torch import ddp
from bagua_hvd.torch.distributed import Options
from bagua_hvd.torch.distributed.works import Work
from torch_group import start
from two_phases import named

SECONDS = 30        # limit of a test, not a measurement


class Overtaken(Work):
    """Another thread completes it right after a method has seen it incomplete."""

    overtaken = False

    @property
    def _ended(self):
        seen = self.seen
        if self.overtaken:
            self.overtaken = False
            self._end()
        return seen

    @_ended.setter
    def _ended(self, ended):
        self.seen = ended


@pytest.mark.parametrize("method", [Work.wait, Work.is_completed])
def test_another_thread_ends_it_meanwhile(method):
    work = Overtaken(Ended(), [], "a test", SECONDS)
    work.overtaken = True
    assert method(work)
    assert work.seen and work.is_success()


def nested(file, algorithm):
    """A collective within then(), nested six times, by the work and by its future."""
    rank, size = start(file, pg_options=Options(algorithm=named(algorithm), min_bytes=0) if algorithm else None)
    deep = 6

    def more(left):
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, async_op=True)
        if not left:
            work.wait()
            return tensor[0].item()
        return work.get_future().then(lambda future: future.value()[0][0].item() + more(left - 1)).wait()

    ends, results = threading.Event(), []
    threading.Thread(target=lambda: (results.append(more(deep)), ends.set()), daemon=True).start()
    assert ends.wait(SECONDS) and results == [size * (deep + 1)]
    dist.barrier()
    dist.destroy_process_group()


def slow(file):
    """Callbacks that wait for the operations after theirs, and one that raises."""
    start(file)
    go_on = threading.Event()
    works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(7)]
    results = []

    def hang(work):         # torch calls it now, on this thread, if the future is complete
        results.append(work.get_future().then(lambda _: go_on.wait(SECONDS)).wait())

    threads = [threading.Thread(target=hang, args=(work,)) for work in works[:5]]
    for thread in threads:
        thread.start()
    failing = works[5].get_future().then(lambda _: 1 / 0)
    ended = threading.Event()
    works[6].get_future().add_done_callback(lambda _: ended.set())
    assert ended.wait(SECONDS)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        failing.wait()
    go_on.set()
    for thread in threads:
        thread.join()
    assert results == [True] * 5
    dist.barrier()
    deadline = time.monotonic() + SECONDS
    while [thread.name for thread in threading.enumerate()].count("bagua_hvd completions") > 3:
        assert time.monotonic() < deadline      # the threads of the five end
        time.sleep(0.01)
    dist.destroy_process_group()


def torchs_powersgd(file):
    """torch's own hook, which waits for a collective within then()."""
    rank, size = start(file)
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(40, 30))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=30, start_powerSGD_iter=2)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):
        net.zero_grad()
        x = torch.randn(size, 4, 40, generator=torch.Generator().manual_seed(step))
        net(x[rank]).pow(2).mean().backward()
    reference = nn.Linear(40, 30)
    reference.load_state_dict(net.module.state_dict())
    reference(x).pow(2).mean().backward()
    assert torch.allclose(net.module.weight.grad, reference.weight.grad, atol=1e-5)
    dist.destroy_process_group()


def refused(file):
    """The error of a failed operation reaches its future, callbacks after it, and backward() of a DDP model."""
    rank, _ = start(file)
    future = dist.all_reduce(torch.ones(1 + rank), async_op=True).get_future()
    later = future.then(lambda ended: ended.value())
    for failed in (future, later):
        with pytest.raises(RuntimeError, match="Mismatched ALLREDUCE tensor shapes: One rank"):
            failed.wait()
    model = DistributedDataParallel(nn.Linear(40, 30))
    model.register_comm_hook(None, ddp.hook(("gradient_allreduce", "bytegrad")[rank]))
    with pytest.raises(RuntimeError, match="Mismatched"):
        model(torch.ones(2, 40)).sum().backward()
    dist.barrier()
    dist.destroy_process_group()


def test_errors_reach_futures(run_group):
    run_group(2, refused)


@pytest.mark.parametrize("algorithm", [None, "bytegrad", "two_phases"])
def test_collectives_within_then(run_group, algorithm):
    run_group(2, nested, algorithm=algorithm)


@pytest.mark.parametrize("function", [slow, torchs_powersgd])
def test_three_ranks(run_group, function):
    run_group(3, function)
