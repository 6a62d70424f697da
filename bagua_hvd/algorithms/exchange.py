"""Several operations, one after the other, as one: what lies between them is written as straight-line code.

    @exchange
    def communicate(self, bucket, group):
        g = bucket.read()
        norm = np.array([g @ g])
        yield c_fp_s(norm, group, name=f"{bucket.name}.norm")
        g /= np.sqrt(norm)                                          # once the mean is there
        yield c_lp_s(g, group, name=f"{bucket.name}.codes")
        bucket.write(g)

The reducer lets it go on whenever another bucket is posted, so that later operations overlap the backward pass, too.
"""
import functools
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, Protocol

from bagua_hvd.training.source import Pending


class Ending(Pending, Protocol):
    """A Pending that says whether its wait() would return at once: an Operation, an Exchange."""

    def done(self) -> bool:
        """See Operation.done."""


Steps = Generator[Ending, None, Any]


class Exchange:
    """What a generator begins, and goes on with whenever the operation that it has yielded has ended.

    All operations of a bucket belong to one thread: that which posts it, and then waits.

    Args:
        steps: yields operations; what it returns is wait()'s result. Its first operation is posted here.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._result: Any = None
        self._failure: Exception | None = None
        self._operation: Ending | None = None
        self._next()
        if self._failure is not None:
            raise self._failure         # nothing was posted

    def _next(self) -> None:
        try:
            if self._operation is not None:
                self._operation.wait()
            self._operation = next(self._steps)
        except StopIteration as end:
            self._operation, self._result = None, end.value
        except Exception as error:
            self._operation, self._failure = None, error

    def advance(self) -> None:
        """Goes on as far as it can without waiting. Raises nothing: wait() does."""
        while self._operation is not None and self._operation.done():
            self._next()

    def done(self) -> bool:
        """Goes on as far as it can without waiting. Returns whether wait() would return, or raise, at once."""
        self.advance()
        return self._operation is None

    def wait(self) -> Any:
        """Goes on to the end. Returns what the generator returned.

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
    """Decorator: what calls a generator function returns its Exchange, which has begun."""
    @functools.wraps(function)
    def begun(*arguments: _P.args, **keywords: _P.kwargs) -> Exchange:
        return Exchange(function(*arguments, **keywords))

    return begun
