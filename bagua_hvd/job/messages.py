"""Messages between launcher, agents, drivers and workers: dataclasses, and the check of every message received.

A message is a JSON object: its dataclass's name in snake case as `type`, and its fields. Received content is used only
after it has been converted to its dataclass.
"""
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Message = TypeVar("Message")


@dataclass(frozen=True)
class Hello:
    """First message of a process. worker: its number, or its rank."""

    worker: int


@dataclass(frozen=True)
class HelloAgain:
    """First message on a connection that replaces a broken one. worker: as in Hello."""

    worker: int


def name_of(kind: type) -> str:
    """The `type` of a dataclass's messages."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def to_dict(message: Any) -> dict[str, Any]:
    """The JSON object of a message."""
    return {"type": name_of(type(message)), **vars(message)}


def received(content: Any, *kinds: type[Message]) -> Message:
    """Converts content to one of these dataclasses. ValueError: it is none of them; the message says why."""
    by_name = {name_of(kind): kind for kind in kinds}
    name = content.get("type") if isinstance(content, Mapping) else None
    if not isinstance(name, str) or name not in by_name:
        raise ValueError(f"a message of type {name!r}: expected {' or '.join(by_name)}")
    return fill(by_name[name], {key: value for key, value in content.items() if key != "type"})


def fill(kind: type[Message], content: Any) -> Message:
    """Makes a dataclass from a mapping with exactly its fields, of their types. ValueError: the mapping differs."""
    hints = _hints(kind)
    if not isinstance(content, Mapping) or content.keys() != hints.keys():
        shown = sorted(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise ValueError(f"{name_of(kind)} with {shown}: expected {sorted(hints)}")
    for name, hint in hints.items():
        if not _fits(content[name], hint):
            raise ValueError(f"{name_of(kind)}: {name} is {content[name]!r:.100}: expected {hint}")
    return kind(**content)


def _hints(kind):
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _fits(value, hint):
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is dict:
        return type(value) is dict and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if origin is list:
        return type(value) is list and all(_fits(one, inner[0]) for one in value)
    return hint is Any or type(value) is hint           # True is not an int
