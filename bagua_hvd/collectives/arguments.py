"""Finds the wrong option of a call: most are checked only after a failure, so that correct calls pay nothing."""
import inspect
from collections.abc import Callable
from typing import Any

from bagua_hvd.collectives.compression import is_compression

# By parameter: the accepted type in words, and a check of a value.
_TAKES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": ("a str", lambda value: value is None or isinstance(value, str)),
    "op": ("one of hvd.Average, Sum, Adasum, Min, Max and Product",
           lambda value: value is None or isinstance(value, int)),
    "average": ("a bool", lambda value: value is None or isinstance(value, bool)),
    "root_rank": ("an int", lambda value: isinstance(value, int)),
    **dict.fromkeys(("prescale_factor", "postscale_factor"), ("a number", lambda value: hasattr(value, "__float__"))),
    "compression": ("one of hvd.Compression", is_compression),
}


def check_name(name: Any, function: str = "a collective") -> None:
    """Raises TypeError or ValueError unless `name` can name an operation: any object would do, as text up to a NUL."""
    if name is not None and not isinstance(name, str):
        raise _wrong(function, "name", name)
    if name and "\0" in name:
        raise ValueError(f"{name!r:.100} cannot name an operation: it has a NUL character")


def _wrong(function, name, value):
    remedy = ": pass other options by keyword, such as process_set= and op=" if name == "name" else ""
    return TypeError(f"{function} takes {_TAKES[name][0]} as `{name}`, not {value!r:.100}{remedy}")


def arguments_of(function: Callable[..., Any], args: tuple, kwargs: dict) -> dict[str, Any]:
    """The values by parameter; {} if the call does not match the signature, for which Python's error is better."""
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return {}


def wrong_option(function: Callable[..., Any], args: tuple, kwargs: dict) -> TypeError | None:
    """A TypeError that names a wrong option and its accepted type; None if all options are right."""
    for name, value in arguments_of(function, args, kwargs).items():
        if name in _TAKES and not _TAKES[name][1](value):
            return _wrong(f"{function.__name__}()", name, value)
    return None
