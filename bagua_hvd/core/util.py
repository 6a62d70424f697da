"""Small helpers that no other file should hold; Horovod has some of them at `common.util`."""
import functools
import warnings
from collections.abc import Callable
from typing import Any


def doc_from(source: Any, note: str | None = None) -> Callable[..., Any]:
    """Decorator: takes the docstring of `source`, after a `note` on this form of it."""

    def decorate(function):
        function.__doc__ = f"{note}\n\n    {source.__doc__}" if note else source.__doc__
        return function

    return decorate


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether the number of ranks is a power of 2."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l, n):  # noqa: E741
    """`l` cut into n pieces whose lengths differ by one at most, the longer ones first."""
    size, longer = divmod(len(l), n)
    starts = [i * size + min(i, longer) for i in range(n + 1)]
    return [l[start:end] for start, end in zip(starts[:-1], starts[1:], strict=True)]


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[..., Any]:
    """handle_average_backwards_compatibility(op, average) over the constants of `reduce_ops` (Average, Sum)."""

    def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
        """The reduction op that the two spellings mean; neither: Average. ValueError: both were given."""
        if average is None:
            return reduce_ops.Average if op is None else op
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("Parameter `average` has been replaced with `op` and will be removed.", DeprecationWarning,
                      stacklevel=3)
        return reduce_ops.Average if average else reduce_ops.Sum

    return handle_average_backwards_compatibility


def _cache(f):
    """Remembers the function's results by its arguments."""
    known = {}

    @functools.wraps(f)
    def cached(*args, **kwargs):
        key = (args, frozenset(kwargs.items()))
        if key not in known:
            known[key] = f(*args, **kwargs)
        return known[key]

    return cached
