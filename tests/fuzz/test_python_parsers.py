"""Python's parsers of foreign input: host files, host lists, configuration files, the elastic channel, frames.

Each input is accepted, or rejected with a ValueError and no other exception; a worker never waits forever.
"""
import argparse
import json
import os
import queue
import random
import socket
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bagua_hvd.job import channel, elastic_worker
from bagua_hvd.job.channel import Hello
from bagua_hvd.job.rendezvous import Register
from bagua_hvd.job.server import Service
from bagua_hvd.runner import launch
from bagua_hvd.runner.common.util.hosts import HostInfo, parse_host_files, parse_hosts
from bagua_hvd.runner.ssh import frames

# `make fuzz` sets FUZZ_SECONDS: then there are many examples.
LONG = "FUZZ_SECONDS" in os.environ
EXAMPLES = 20_000 if LONG else 60
pytestmark = [pytest.mark.timeout(1800)] if LONG else []
fuzzed = settings(max_examples=EXAMPLES, deadline=None, derandomize=not LONG,
                  suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
SAID = (Register, elastic_worker.Join, elastic_worker.Synced, elastic_worker.Assignment, elastic_worker.HostsUpdated)
HOST_LIKE = st.text(st.sampled_from("abc019:=, \t#[].-slots\n\u00b2\u0661\r\0"), max_size=40)
SECRET = b"s" * 32


def refused_or(function, *arguments):
    """The function's result; None if it raised a ValueError with a sentence."""
    try:
        return function(*arguments)
    except ValueError as error:
        assert str(error)
        return None


@fuzzed
@given(HOST_LIKE | st.text(max_size=60))
@example("a:\u00b2")
@example("a:" + "9" * 5000)
@example("a:-1,b:0")
def test_host_lists(text):
    for host in refused_or(parse_hosts, text) or []:
        assert isinstance(host, HostInfo) and host.slots > 0 and host.hostname


@fuzzed
@given(st.binary(max_size=80) | HOST_LIKE.map(str.encode))
@example(b"a slots=2 # \xff\n")
@example(b"a slots=\n")
@example(b"\0\n")
def test_host_files(tmp_path, data):
    path = tmp_path / "hosts"
    path.write_bytes(data)
    refused_or(lambda: parse_hosts(parse_host_files(str(path))))


@fuzzed
@given(st.binary(max_size=120) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["params", "fusion-threshold-mb", "timeline", "autotune", "stall-check", "logging", "level",
                         "library-options", "check", "filename", "x"]), inner, max_size=4)
).map(lambda value: json.dumps(value).encode()))
@example(b"[" * 5000)
@example(b"&a [*a]")
@example(b"params: {fusion-threshold-mb: !!python/object:os.system {}}")
def test_configuration_files(tmp_path, data):
    path = tmp_path / "config.yaml"
    path.write_bytes(data)
    args = argparse.Namespace(config_file=str(path))
    refused_or(launch._read_config_file, args)


@fuzzed
@given(st.binary(max_size=200))
@example(b"[" * 60_000 + b"\n")
@example(b'{"a":' * 20_000 + b"\n")
@example(b"1" * 10_000 + b"\n")
@example("{}\n".encode("utf-16"))
def test_messages_of_the_elastic_channel(line):
    message = refused_or(lambda line: channel.decode(line, *SAID), line)
    assert message is None or (isinstance(message, SAID) and line.endswith(b"\n"))


def line_of(content):
    return json.dumps(content).encode() + b"\n"


JSON = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
MESSAGES = st.dictionaries(
    st.sampled_from(["type", "environment", "scope", "skip_sync", "timestamp", "result", "reason", "failure",
                     "silent"]),
    JSON | st.sampled_from(["assignment", "removed", "refused", "hosts_updated", "join", "syncing", "synced"]),
    max_size=5)


@fuzzed
@given(MESSAGES)
@example({"type": "hosts_updated"})
@example({"type": "assignment", "environment": None})
@example({})
def test_a_worker_ends_whatever_its_driver_says(message):
    """A malformed message counts as a closed connection: init() raises instead of waiting."""
    link = elastic_worker.DriverLink.__new__(elastic_worker.DriverLink)
    lines = iter([line_of(message)])

    def receive(*kinds):
        for line in lines:
            return refused_or(lambda line: channel.decode(line, *kinds), line)

    link._responses, link._refused = queue.SimpleQueue(), None
    link._on_hosts_updated = lambda *update: None
    link._sending = threading.Lock()
    link._connection = SimpleNamespace(receive=receive, send=lambda message: None)
    with mock.patch.object(elastic_worker, "_CONNECTIONS_MAX", 0):
        link._receive()
    try:
        link.join()
    except (ValueError, elastic_worker.RemovedFromJob):
        pass


@pytest.fixture(scope="module")
def service():
    """A Service that checks its events as the driver does."""
    errors = []
    threading.excepthook, before = lambda args: errors.append(args.exc_value), threading.excepthook

    def on_event(event, number, message):
        assert event in ("join", "syncing", "synced", "disconnected") and isinstance(number, int)
        if event == "join":
            assert type(message.skip_sync) is bool and isinstance(message.failure, str | None)
            assert type(message.silent) in (int, type(None))

    with Service(SECRET, on_event, elastic_worker.WORKER_SAYS) as service:
        service.loop.set_exception_handler(lambda loop, context: errors.append(context))
        yield service
    threading.excepthook = before
    assert not errors, errors


@fuzzed
@given(st.lists(MESSAGES.map(line_of) | st.binary(max_size=50), max_size=4))
@example([b"[" * 60_000 + b"\n"])
@example([line_of({"type": "hello", "worker": True}), line_of({"type": "join"})])
def test_the_service_takes_whatever_a_worker_says(service, said):
    connection = channel.Connection("127.0.0.1", service.port, SECRET, 10)
    try:
        connection.send(Hello(random.randrange(1 << 30)))
        for data in said:
            connection.socket.sendall(data)
        connection.socket.shutdown(socket.SHUT_WR)
        while connection._file.read(100):
            pass
    except OSError:
        pass        # the service has closed the connection
    finally:
        connection.close()
        connection._file.close()


@fuzzed
@given(st.lists(st.binary(max_size=30), max_size=6), st.booleans())
@example([b"\x21\0\0\0\1\xff\xff\xff\xff"], False)
@example([b"\x63\0\0\0\1\0\0\0\0"], False)
def test_frames_of_ssh(pieces, after_magic):
    reader = frames.Reader(after_magic)
    for piece in pieces:
        for kind, number, payload in refused_or(reader.feed, piece) or []:
            assert isinstance(kind, frames.Kind) and 0 <= number < 1 << 32 and isinstance(payload, bytes)
