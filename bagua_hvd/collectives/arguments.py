"""What was wrong with the options of a call that failed: looked at only then, so that right calls pay nothing."""
import inspect
from collections.abc import Callable
from typing import Any

from bagua_hvd.collectives.compression import is_compression

# By parameter: what it takes, and whether a value is that.
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
    """The values by parameter; none where the call does not fit the function, which Python says better."""
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return {}


def wrong_option(function: Callable[..., Any], args: tuple, kwargs: dict) -> TypeError | None:
    """A TypeError that names an option of the call and what it takes; None: all of them are right."""
    for name, value in arguments_of(function, args, kwargs).items():
        takes, is_right = _TAKES.get(name, ("", lambda value: True))
        if not is_right(value):
            return TypeError(f"{function.__name__}() takes {takes} as `{name}`, not {value!r:.100}")
    return None
