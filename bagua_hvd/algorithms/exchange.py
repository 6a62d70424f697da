"""Multi-phase operations: several operations in sequence, written as straight-line code.

    @exchange
    def communicate(self, bucket, group):
        g = bucket.read()
        norm = np.array([g @ g])
        yield c_fp_s(norm, group, name=f"{bucket.name}.norm")
        g /= np.sqrt(norm)                                          # once the mean is there
        yield c_lp_s(g, group, name=f"{bucket.name}.codes")
        bucket.write(g)

The reducer advances it whenever another bucket is posted, so that later phases also overlap the backward pass.
"""
import functools
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, Protocol

from bagua_hvd.core.operations import byte_counter, counted
from bagua_hvd.training.source import Pending


class Ending(Pending, Protocol):
    """A Pending that can be polled: an Operation or an Exchange."""

    def done(self) -> bool:
        """See Operation.done."""


Steps = Generator[Ending, None, Any]


class Exchange:
    """A multi-phase operation: resumes a generator whenever the operation that it has yielded has ended.

    One thread runs all operations of a bucket: the one that posts it and then waits. All of them add to the counter of
    bytes sent that was set when the first was posted.

    Args:
        steps: generator of operations; its return value is wait()'s result. The constructor posts the first operation.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._result: Any = None
        self._failure: Exception | None = None
        self._operation: Ending | None = None
        self._byte_counter = byte_counter.get()
        self._next()
        if self._failure is not None:
            raise self._failure         # nothing was posted

    def _next(self) -> None:
        try:
            if self._operation is not None:
                self._operation.wait()
            self._operation = counted(self._byte_counter, next, self._steps)
        except StopIteration as end:
            self._operation, self._result = None, end.value
        except Exception as error:
            self._operation, self._failure = None, error

    def advance(self) -> None:
        """Advances as far as possible without blocking. Raises nothing: wait() does."""
        while self._operation is not None and self._operation.done():
            self._next()

    def done(self) -> bool:
        """Advances as far as possible without blocking. Returns whether wait() would not block."""
        self.advance()
        return self._operation is None

    def wait(self) -> Any:
        """Runs to the end. Returns the return value of the generator.

        Raises:
            HorovodInternalError: ranks disagreed, or one was lost; and whatever the generator raises.
        """
        while self._operation is not None:
            self._next()
        if self._failure is not None:
            raise self._failure
        return self._result


_P = ParamSpec("_P")


def exchange(function: Callable[_P, Steps]) -> Callable[_P, Exchange]:
    """Decorator: calls of the generator function start its Exchange and return it."""
    @functools.wraps(function)
    def begun(*arguments: _P.args, **keywords: _P.kwargs) -> Exchange:
        return Exchange(function(*arguments, **keywords))

    return begun
