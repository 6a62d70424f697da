"""Several operations as one: their order, the result, and errors."""
import pytest

from bagua_hvd.algorithms.exchange import exchange


class Operation:
    """Ends when the test says so, or when waited for."""

    def __init__(self, log, name, error=None):
        self.log, self.name, self.error = log, name, error
        self.ended = False
        log.append(f"post {name}")

    def done(self):
        return self.ended

    def wait(self):
        self.ended = True
        self.log.append(f"wait {self.name}")
        if self.error is not None:
            raise self.error


@exchange
def two(log, operations, error=None):
    operations.append(Operation(log, "first", error))
    yield operations[-1]
    log.append("between")
    operations.append(Operation(log, "second"))
    yield operations[-1]
    log.append("after")
    return 7


def test_wait_goes_on_to_the_end():
    log, operations = [], []
    begun = two(log, operations)
    assert log == ["post first"]
    assert begun.wait() == 7
    assert log == ["post first", "wait first", "between", "post second", "wait second", "after"]
    assert begun.wait() == 7 and begun.done() and len(log) == 6


def test_done_goes_on_as_far_as_it_can():
    log, operations = [], []
    begun = two(log, operations)
    assert not begun.done() and log == ["post first"]
    operations[0].ended = True
    assert not begun.done() and log[-1] == "post second"
    operations[1].ended = True
    assert begun.done() and log[-1] == "after" and begun.wait() == 7


@pytest.mark.parametrize("poll", [False, True])
def test_a_failure_is_raised_by_wait_every_time(poll):
    log, operations = [], []
    begun = two(log, operations, KeyError("lost"))
    if poll:
        operations[0].ended = True
        assert begun.done()         # wait() would raise at once
    for _ in range(2):
        with pytest.raises(KeyError, match="lost"):
            begun.wait()
    assert "between" not in log


def test_what_cannot_be_posted_is_raised_where_it_is_begun():
    @exchange
    def refused():
        raise ValueError("no")
        yield

    with pytest.raises(ValueError, match="no"):
        refused()
