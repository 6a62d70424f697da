"""Finds the wrong option of a failed call: checked only after a failure, so that correct calls pay nothing."""
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


def arguments_of(function: Callable[..., Any], args: tuple, kwargs: dict) -> dict[str, Any]:
    """The values by parameter; {} if the call does not match the signature, for which Python's error is better."""
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return {}


def wrong_option(function: Callable[..., Any], args: tuple, kwargs: dict) -> TypeError | None:
    """A TypeError that names a wrong option and its accepted type; None if all options are right."""
    for name, value in arguments_of(function, args, kwargs).items():
        takes, is_right = _TAKES.get(name, ("", lambda value: True))
        if not is_right(value):
            return TypeError(f"{function.__name__}() takes {takes} as `{name}`, not {value!r:.100}")
    return None
