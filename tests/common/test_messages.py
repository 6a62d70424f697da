"""A received message equals the dataclass that was sent, or raises an error."""
import json
from dataclasses import dataclass, field

import pytest

from bagua_hvd.job import channel
from bagua_hvd.job.channel import Hello, fill, name_of
from bagua_hvd.job.engines import ExchangeUnavailable
from bagua_hvd.job.join import _parse_rendezvous_info


@dataclass(frozen=True)
class ManyThings:
    count: int
    flag: bool
    text: str | None
    names: list[str]
    table: dict[str, str | None] = field(default_factory=dict)


WHOLE = ManyThings(1, True, None, ["a"], {"b": None, "c": "d"})
CONTENT = {"type": "many_things", **vars(WHOLE)}


def received(content, *kinds):
    return channel.decode(json.dumps(content).encode() + b"\n", *kinds)


def test_there_and_back():
    assert channel.decode(channel.encode(WHOLE), Hello, ManyThings) == WHOLE
    assert name_of(ManyThings) == "many_things" and received(CONTENT, ManyThings) == WHOLE


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"count": True}, "many_things: count is True: expected <class 'int'>"), ({"count": "1"}, "count is '1'"),
    ({"flag": 1}, "flag is 1"), ({"text": 3}, r"text is 3: expected str \| None"), ({"names": ["a", 1]}, "names is"),
    ({"names": "a"}, "names is 'a'"), ({"table": {"a": 1}}, "table is"), ({"table": None}, "table is None"),
    ({"more": 1}, "many_things with .*more.*: expected"),
    ({"type": "other"}, "type 'other': expected hello or many_things"),
    ({"type": None}, "type None"), ({"type": ["hello"]}, "type None|expected"),
])
def test_something_else_is_a_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        received({**CONTENT, **changes}, Hello, ManyThings)


@pytest.mark.parametrize("content", [None, [], "hello", 1, {}, {"count": 1}])
def test_no_mapping_or_fields_missing(content):
    with pytest.raises(ValueError, match="expected"):
        fill(ManyThings, content)
    with pytest.raises(ValueError, match="expected"):
        received(content, ManyThings)


@pytest.mark.parametrize("line", [b"", b"{}", b'{"type": "hello", "worker": 1}', b"nonsense\n", b"[" * 60_000 + b"\n"])
def test_lines_that_are_none(line):
    with pytest.raises(ValueError):
        channel.decode(line, Hello)


@pytest.mark.parametrize("content", [b"", b"{", b'{"port": "1"}', b"\xff", b"[1]"])
def test_what_rank_0_of_another_job_left(content):
    with pytest.raises(ExchangeUnavailable, match="rank 0's message is not understood"):
        _parse_rendezvous_info(content)
