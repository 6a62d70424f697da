"""Callbacks at the end of operations: in any order, from any thread, with and without errors."""
import threading

import numpy as np
import pytest

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from world import TRANSPORTS, World, view


def post(context, name, value=1.0, count=3, kind=native.ALLREDUCE):
    x = np.full(count, value, np.float32)
    return x, context.post(kind, name, [view(x, "float32", "in place")])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_operations_that_end_in_another_order_are_told_as_they_end(transport):
    with World(2, transport) as world:
        def call(rank, context):
            told, all_told = [], threading.Event()
            operations = [post(context, f"x{i}")[1] for i in range(2)] if rank == 0 else []
            for i, operation in enumerate(operations):
                operation.when_ended(lambda i=i: (told.append(i), all_told.set() if len(told) == 2 else None))
            if rank == 1:
                for i in (1, 0):                # in reverse order
                    post(context, f"x{i}")[1].wait()
                    post(context, f"gate{i}")[1].wait()
                return
            for i in (1, 0):
                post(context, f"gate{i}")[1].wait()
            assert all_told.wait(20)
            return told

        assert world.run(call)[0] == [1, 0]


def test_an_operation_that_has_ended_is_told_at_once_and_only_one_callback_is_taken():
    with World(2) as world:
        def call(rank, context):
            _, operation = post(context, "x")
            operation.wait()
            told = threading.Event()
            operation.when_ended(told.set)
            assert told.wait(20)
            _, other = post(context, f"alone.{rank}") if rank == 0 else (None, None)
            if other is not None:
                other.when_ended(lambda: None)
                with pytest.raises(ValueError, match="already has a completion callback"):
                    other.when_ended(lambda: None)

        world.run(call)


def test_failures_end_operations_too():
    with World(2) as world:
        def call(rank, context):
            told = threading.Event()
            x = np.ones(2 + rank, np.float32)
            operation = context.post(native.ALLREDUCE, "shapes", [view(x, "float32", "in place")])
            operation.when_ended(told.set)
            assert told.wait(20)
            with pytest.raises(HorovodInternalError, match="Mismatched"):
                operation.wait()
            left = threading.Event()
            if rank == 0:
                _, operation = post(context, "never")
                operation.when_ended(left.set)
                context.shutdown()
                assert left.wait(20)

        world.run(call)


def test_many_threads_and_many_operations():
    """Each callback runs exactly once, while posts, completions and callbacks race."""
    with World(2) as world:
        def call(rank, context):
            counts, done, lock = {}, threading.Semaphore(0), threading.Lock()

            def tell(name):
                with lock:
                    counts[name] = counts.get(name, 0) + 1
                done.release()

            def some(thread):
                for i in range(100):
                    _, operation = post(context, f"{thread}.{i}")
                    operation.when_ended(lambda name=f"{thread}.{i}": tell(name))

            threads = [threading.Thread(target=some, args=(thread,)) for thread in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert all(done.acquire(timeout=20) for _ in range(400))
            return counts

        assert all(len(counts) == 400 and set(counts.values()) == {1} for counts in world.run(call))


def test_a_callback_that_raises_does_not_silence_the_others(monkeypatch, capfd):
    raised, printed = [], threading.Event()

    def hook(error):
        raised.append(error.exc_type)
        threading.__excepthook__(error)
        printed.set()

    monkeypatch.setattr("threading.excepthook", hook)
    with World(1) as world:
        def call(rank, context):
            told = threading.Event()
            _, first = post(context, "a")
            first.wait()
            first.when_ended(lambda: 1 / 0)
            _, second = post(context, "b")
            second.when_ended(told.set)
            assert told.wait(20)        # runs on this thread if the second has already ended

        world.run(call)
    assert printed.wait(20)
    assert raised == [ZeroDivisionError]
    said = capfd.readouterr().err
    assert "Exception in thread bagua_hvd completions" in said and "ZeroDivisionError: " in said
    assert "TypeError" not in said


def test_waiting_for_a_limited_time():
    with World(2) as world:
        def call(rank, context):
            if rank == 1:
                post(context, "gate")[1].wait()
                return post(context, "x")[1].wait()
            _, operation = post(context, "x")
            assert not operation.ended_within(0.05) and not operation.ended_within(0)
            post(context, "gate")[1].wait()
            assert operation.ended_within(20) and operation.ended_within(0)
            operation.wait()

        world.run(call)
