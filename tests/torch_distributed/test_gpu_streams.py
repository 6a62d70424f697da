"""Groups with tensors on a GPU: streams, and results that NCCL leaves on the GPU.

PyTorch may lack CUDA here: fake streams record their calls, and tensors of the CPU act as those of a GPU.
"""
import ctypes
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from bagua_hvd.torch.distributed import operations, point_to_point, works
from bagua_hvd.torch.frontend import TorchFrontend

pytestmark = pytest.mark.timeout(60)


class Stream:
    """Records its calls, in order."""

    def __init__(self, name):
        self.name, self.given = name, []

    def record_event(self):
        event = SimpleNamespace(stream=self.name, behind=len(self.given), reached=False)
        event.query = lambda: event.reached
        return event

    def wait_event(self, event):
        self.given.append(event)


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda with one current stream per thread."""
    current = threading.local()
    default = Stream("default")

    @contextmanager
    def stream(entered):
        before = getattr(current, "stream", default)
        current.stream = entered
        yield
        current.stream = before

    own = Stream("own")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: getattr(current, "stream", default))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(works, "_own_stream", lambda device: own)
    monkeypatch.setattr(works, "Future", lambda devices: SimpleNamespace(
        devices=devices, set_result=lambda value: own.given.append(("completed on", torch.cuda.current_stream().name))))
    monkeypatch.setattr(works._OnGpu, "_unread", [])
    return SimpleNamespace(own=own, default=default, stream=stream)


class Operation:
    """A completed operation. wait() enqueues a wait on the current stream."""

    def wait(self):
        torch.cuda.current_stream().given.append("results")

    def ended_within(self, seconds):
        return True

    def done(self):
        return True

    def when_ended(self, callback):
        thread = threading.Thread(target=callback)
        thread.start()
        thread.join()


OUTPUT = SimpleNamespace(is_cpu=False, device="cuda:0")


def copy_results():
    torch.cuda.current_stream().given.append("copies")


def work():
    return works.Work(Operation(), [OUTPUT], "an operation", 60, copy_results)


def test_another_stream_waits_for_the_copies(cuda):
    """The first stream that asks for completion gets the copies; another stream that waits runs after them."""
    side = Stream("side")
    with cuda.stream(side):
        posted = work()
    assert posted.is_completed()
    begun, *copied = cuda.default.given
    assert begun.stream == "side" and copied == ["results", "copies"]
    with cuda.stream(side):
        posted.wait()
    assert (side.given[-1].stream, side.given[-1].behind) == ("default", 3)


def test_what_another_stream_uses_lives_until_it_is_done(cuda):
    with cuda.stream(Stream("side")):
        posted = work()
    assert posted.is_completed()
    [(event, memory)] = works._OnGpu._unread
    assert memory == (copy_results, [OUTPUT])
    work().wait()
    assert works._OnGpu._unread == [(event, memory)]
    event.reached = True
    work().wait()
    assert works._OnGpu._unread == []


def test_a_future_gives_the_computation_nothing_to_wait_for(cuda):
    """The thread that completes it has the default stream, which the computation uses, too."""
    posted = work()
    posted.get_future()
    assert cuda.default.given == []
    begun, *rest = cuda.own.given
    assert begun.stream == "default"
    assert rest[:2] == ["results", "copies"] and rest[-1] == ("completed on", "own")
    posted.wait()
    assert [event.stream for event in cuda.default.given] == ["own"]


def test_an_algorithm_that_is_waited_for_in_a_thread(cuda):
    waited = works.Waiter()(Operation(), OUTPUT)
    assert waited.ended_within(60)
    assert cuda.default.given == []
    waited.wait()
    assert [event.stream for event in cuda.default.given] == ["own"]
    assert "results" in cuda.own.given


class PosingFrontend(TorchFrontend):
    """Claims that its tensors are on a GPU, though they are in host memory."""

    placement = SimpleNamespace(stream=lambda: 0)

    def view(self, tensor, output=None):
        return super().view(tensor, output)._replace(placement=self.placement)


class OnGpu:
    """An operation with a result that NCCL has left on the GPU."""

    def __init__(self, values):
        self.values = values

    def device_rows(self, index):
        return len(self.values)

    def copy_result(self, index, address):
        ctypes.memmove(address, self.values.data_ptr(), self.values.nbytes)

    def result(self, index):
        raise ValueError("the operation has no result 0")


def test_a_small_message_that_nccl_leaves_on_the_gpu(monkeypatch):
    monkeypatch.setattr(point_to_point, "frontend", frontend := PosingFrontend())
    sent, wanted = torch.arange(5.0), torch.empty(5)
    like = torch.empty(0, dtype=torch.uint8)
    pair = point_to_point.Future()
    pair.set_result(0)
    message = point_to_point._Message(pair, lambda id: OnGpu(sent.view(torch.uint8)), 1, wanted,
                                      (frontend.view(like), like))
    message.take()
    assert torch.equal(wanted, sent)
    with pytest.raises(ValueError, match="recv of 8 bytes, but rank 1 sent 20"):
        message.take(torch.empty(2))


def test_parts_that_nccl_leaves_on_the_gpu(monkeypatch):
    monkeypatch.setattr(operations, "frontend", frontend := PosingFrontend())
    outputs = [torch.empty(2), torch.empty(3)]
    like = torch.ones(2)
    group = SimpleNamespace(_place=lambda rank: rank)
    operations.Operations._take_parts(group, OnGpu(torch.arange(5.0)), [frontend.view(like)], like,
                                      dict(enumerate(outputs)), "all_gather", {0: 2, 1: 3})
    assert [output.tolist() for output in outputs] == [[0, 1], [2, 3, 4]]


def test_a_first_message_is_posted_in_the_order_of_its_threads_stream(monkeypatch):
    """It holds though another thread posts it, when the process set of the two exists."""
    frontend = PosingFrontend()
    frontend.placement = SimpleNamespace(stream=lambda: 7)
    monkeypatch.setattr(point_to_point, "frontend", frontend)
    streams = []
    context = SimpleNamespace(post=lambda *positional, stream, **named: streams.append(stream))
    messages = point_to_point.PointToPoint(context, "key", 0, [0, 1, 2], 0)
    pair = point_to_point.Future()
    monkeypatch.setattr(messages, "_pair", lambda *_: pair)
    messages.send(torch.ones(2), 1, 0)
    messages.receive(torch.ones(2), 1, 0)
    messages.receive(torch.ones(1 << 16), 1, 0)
    frontend.placement.stream = lambda: 8
    pair.set_result(5)
    assert streams == [7, 7, 7]
