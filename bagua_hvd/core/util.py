"""Small helpers without a better place; Horovod has some of them in `common.util`."""
import enum
import functools
import inspect
import re
import sys
import textwrap
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Started = TypeVar("_Started")
_WIDTH = 116
_PACKAGE = __name__.partition(".")[0]
# In a docstring: a parameter and its description, in this line and further ones.
_ARGUMENT = re.compile(r"\n {4}(\w+): .*(?:\n {5,}.*)*")


def doc_from(source: Any, note: str | None = None, **arguments: str) -> Callable[..., Any]:
    """Decorator: takes over `source`'s docstring, after `note`, without the parameters that only `source` has.

    Args:
        arguments: descriptions, by name, of parameters that `source` does not have.
    """
    doc = inspect.cleandoc(source.__doc__ or "")     # some Pythons leave its indentation in __doc__, others do not
    if note:
        doc = f"{textwrap.fill(note, _WIDTH)}\n\n{doc}"
    further = [textwrap.fill(f"{name}: {text}", _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
               for name, text in arguments.items()]
    if further:
        before, after = re.split(r"(?=\n(?:Returns|Raises):|\Z)", doc, maxsplit=1)
        doc = "\n".join([before, *further]) + after

    def decorate(function):
        missing = inspect.signature(source).parameters.keys() - inspect.signature(function).parameters.keys()
        function.__doc__ = _ARGUMENT.sub(lambda entry: "" if entry[1] in missing else entry[0], doc)
        return function

    return decorate


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether num_rank, a number of ranks, is a power of 2."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[Any], n: int) -> list[Any]:  # noqa: E741
    """`l` cut into n pieces whose lengths differ by one at most, the longer ones first."""
    size, longer = divmod(len(l), n)
    starts = [i * size + min(i, longer) for i in range(n + 1)]
    return [l[start:end] for start, end in zip(starts[:-1], starts[1:], strict=True)]


def deprecated(name: str, replacement: str) -> None:
    """Warns that version 2.0 removes `name`, at the line that called the package: Python hides other warnings."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{name} is deprecated, use {replacement}; bagua_hvd 2.0 removes it", DeprecationWarning,
                  stacklevel=level)


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[..., Any]:
    """handle_average_backwards_compatibility(op, average) over the constants of `reduce_ops` (Average, Sum)."""

    def handle_average_backwards_compatibility(op: int | None, average: Any) -> int:
        """The reduction op meant by `op` or the deprecated `average`; neither: Average. ValueError: both are given."""
        if average is None:
            return reduce_ops.Average if op is None else op
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if isinstance(average, (str, enum.Enum)):
            meant = f"name={average!r}" if isinstance(average, str) else f"op=hvd.{average.name}"
            raise ValueError(f"the second parameter is `average`, which is deprecated: write {meant}")
        deprecated("parameter `average`", "`op`")
        return reduce_ops.Average if average else reduce_ops.Sum

    return handle_average_backwards_compatibility


def _cache(f):
    """Horovod's name for functools.cache()."""
    return functools.cache(f)


def in_window(items: Iterable[_Item], start: Callable[[_Item], _Started], finish: Callable[[_Started], object],
              nbytes: Callable[[_Item], int], limit: int = 64 << 20) -> None:
    """Runs an operation for each item, in order, with at most about `limit` bytes in flight.

    Tensors of GPUs that are copied through the host need pinned memory of their size, which is kept afterwards.

    Args:
        items: iterable. start: called with an item; its result is passed to `finish`. nbytes: the bytes of an item.
    """
    running: deque[tuple[_Started, int]] = deque()
    in_flight = 0
    try:
        for item in items:
            size = nbytes(item)
            while running and in_flight + size > limit:
                started, done = running.popleft()
                finish(started)
                in_flight -= done
            running.append((start(item), size))
            in_flight += size
        while running:
            finish(running.popleft()[0])
    except Exception:
        for started, _ in running:      # they hold memory and handles until somebody waits for them
            with suppress(Exception):
                finish(started)
        raise
