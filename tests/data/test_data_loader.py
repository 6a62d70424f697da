"""BaseDataLoader and AsyncDataLoaderMixin: order, epochs, failures, closing."""
import subprocess
import sys
import threading
import time

import pytest

from bagua_hvd.data import AsyncDataLoaderMixin, BaseDataLoader


class Loader(BaseDataLoader):
    def __init__(self, count=3, fail_at=None):
        self.count = count
        self.fail_at = fail_at
        self.epochs = 0
        self.read = 0
        self.threads = set()

    def __len__(self):
        return self.count

    def _iterate(self):
        self.epochs += 1
        for i in range(self.count):
            if self.fail_at == (self.epochs, i):
                raise RuntimeError("cannot read")
            self.read += 1
            self.threads.add(threading.current_thread())
            yield self.epochs, i


class AsyncLoader(AsyncDataLoaderMixin, Loader):
    pass


def epoch(number, count=3):
    return [(number, i) for i in range(count)]


@pytest.fixture
def make():
    made = []

    def make_loader(*args, **kwargs):
        made.append(AsyncLoader(*args, **kwargs))
        return made[-1]

    yield make_loader
    for loader in made:
        loader.close_async_loader()
        assert not loader.started and loader._thread is None or not loader._thread.is_alive()


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_base():
    class Doubling(Loader):
        def _process_batch(self, batch):
            return batch * 2

    loader = Doubling()
    assert list(loader) == [batch * 2 for batch in epoch(1)] and len(loader) == 3
    assert list(loader) == [batch * 2 for batch in epoch(2)]
    with pytest.raises(NotImplementedError):
        len(BaseDataLoader())
    with pytest.raises(NotImplementedError):
        list(BaseDataLoader())


@pytest.mark.parametrize("queue_size", [0, 1, 2, 64])
def test_epochs(make, queue_size):
    loader = make(queue_size, count=3)
    assert (loader.async_loader_queue_size, loader.debug_data_loader, loader.started) == (queue_size, False, False)
    for number in (1, 2, 3):
        assert list(loader) == epoch(number)
    assert loader.started == (queue_size > 0)
    assert (threading.current_thread() in loader.threads) == (queue_size == 0)


@pytest.mark.parametrize("queue_size", [0, 2])
def test_a_batch_may_be_none(queue_size):
    class Nones(Loader):
        def _iterate(self):
            yield from (1, None, 2)

    class Async(AsyncDataLoaderMixin, Nones):
        pass

    loader = Async(queue_size)
    assert [list(loader), list(loader)] == [[1, None, 2]] * 2
    loader.close_async_loader()


def test_reads_ahead_as_far_as_the_queue_goes(make):
    loader = make(5, count=3)
    iterator = iter(loader)
    next(iterator)
    # One was taken, five are in the queue (one marks the end of the epoch), the thread holds one.
    wait_for(lambda: loader.read == 6)
    time.sleep(0.05)
    assert loader.read == 6


def test_processing_is_the_consumers(make):
    loader = make()
    seen = []
    loader._process_batch = lambda batch: seen.append(threading.current_thread()) or batch
    assert list(loader) == epoch(1)
    assert seen == [threading.current_thread()] * 3


def test_an_iteration_left_early_is_taken_up_again(make):
    loader = make()
    assert next(iter(loader)) == (1, 0)
    assert list(loader) == [(1, 1), (1, 2)]
    assert list(loader) == epoch(2)


@pytest.mark.parametrize("queue_size", [0, 4])
def test_failure_after_the_batches_before_it(make, queue_size):
    loader = make(queue_size, fail_at=(2, 1))
    assert list(loader) == epoch(1)
    got = []
    with pytest.raises(RuntimeError, match="cannot read"):
        for batch in loader:
            got.append(batch)
    assert got == [(2, 0)]
    assert list(loader) == epoch(3)


def test_close(make):
    loader = make(2, count=100)
    loader.close_async_loader()         # nothing to close yet
    next(iter(loader))
    thread = loader._thread
    loader.close_async_loader()
    loader.close_async_loader()
    assert not thread.is_alive() and loader.queue.empty() and loader.finished_event.is_set()
    assert next(iter(loader)) == (2, 0)     # a new thread, a new epoch


def test_closed_by_another_thread_ends_a_waiting_iteration(make):
    loader = make()
    begun, go_on = threading.Event(), threading.Event()

    def slow():
        begun.set()
        go_on.wait()
        yield 1

    loader._iterate = slow
    got = []
    consumer = threading.Thread(target=lambda: got.extend(loader))
    consumer.start()
    begun.wait()
    closer = threading.Thread(target=loader.close_async_loader)
    closer.start()
    consumer.join()
    go_on.set()
    closer.join()
    assert got == []


def test_empty_epochs(make):
    loader = make(3, count=0)
    assert [list(loader) for _ in range(3)] == [[], [], []]


def test_debug_output(make, capsys):
    loader = make(4, True)
    list(loader)
    loader.close_async_loader()
    assert "AsyncLoader: starting" in capsys.readouterr().out


def test_a_loader_that_is_not_closed_does_not_hold_up_the_end():
    code = ("from bagua_hvd.data import *\n"
            "class L(AsyncDataLoaderMixin, BaseDataLoader):\n"
            "    def _iterate(self):\n"
            "        yield from range(10**9)\n"
            "print(next(iter(L(4))))\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
