"""The driver's connections: who is accepted, what is received, and how strangers are rejected."""
import asyncio
import os
import queue
import socket
import subprocess
import sys
import time

import pytest

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job import channel, elastic_worker
from bagua_hvd.job.channel import Hello
from bagua_hvd.job.elastic_worker import (
    WORKER_SAYS,
    Assignment,
    DriverLink,
    HostsUpdated,
    Join,
    Ping,
    Refused,
    Removed,
    RemovedFromJob,
    Synced,
)
from bagua_hvd.job.server import Service
from launcher import ROOT

SECRET = b"s" * 32
PLACE = {f"HOROVOD_{name}": str(i) for i, name in enumerate(
    ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "GLOO_IFACE"])}


@pytest.fixture
def service():
    """A Service that puts its events into service.events."""
    events = queue.Queue()
    with Service(SECRET, lambda *event: events.put(event), WORKER_SAYS) as service:
        service.events = events
        yield service


def connect(service, secret=SECRET):
    return channel.Connection("127.0.0.1", service.port, secret, 10)


def event(service):
    return service.events.get(timeout=10)


def worker_2(service):
    """Its connection, once the service knows it."""
    connection = connect(service)
    connection.send(Hello(2))
    connection.send(Synced())
    assert event(service)[:2] == ("synced", 2)
    return connection


def test_messages(service):
    updates = queue.Queue()
    service.send(3, Refused("lost: nobody is there yet"))
    link = DriverLink(f"127.0.0.1:{service.port}", SECRET, 3, lambda *update: updates.put(update))
    service.send(4, Refused("for nobody"))
    link.send_to_driver(Synced())
    assert event(service) == ("synced", 3, Synced())
    service.send(3, HostsUpdated(5, 2))
    service.send(3, Assignment({**PLACE, "PATH": "no"}, "elastic.1", True, False))
    assignment = link.join(skip_sync=True)
    assert event(service) == ("join", 3, Join(True, None, None))
    assert (assignment.environment, assignment.scope, assignment.skip_sync) == (PLACE, "elastic.1", True)
    assert updates.get(timeout=10) == (5, 2)
    service.send(3, Ping())
    assert event(service) == ("ping", 3, Ping())
    service.send(3, Removed())
    with pytest.raises(RemovedFromJob) as raised:
        link.join()
    assert raised.value.code == 0
    service.send(3, Refused("It is over."))
    with pytest.raises(ValueError, match="Horovod initialization failed. It is over."):
        link.join()


@pytest.mark.parametrize(("cause", "silent"), [("silent", 2), ("ended", None), ("timeout", None), (None, None)])
def test_who_was_silent(monkeypatch, cause, silent):
    monkeypatch.setattr(elastic_worker.worker, "silent", None)
    with pytest.raises(HorovodInternalError) as raised:
        native.raise_failure(native.Failure(native.ERR_PEER_LOST, "rank 5 was lost: nothing came from it", 2, cause))
    elastic_worker.failed(raised.value)
    assert elastic_worker.worker.silent == silent


def test_a_worker_that_hangs_up(service):
    connection = connect(service)
    connection.send(Hello(1))
    connection.send(Synced())
    assert event(service)[:2] == ("synced", 1)
    connection.close()
    connection._file.close()
    assert event(service) == ("disconnected", 1, None)


def test_beside_a_loop_of_the_callers_own():
    """In a notebook, the thread that starts a job already runs an event loop."""
    async def cell():
        with Service(SECRET, lambda *event: None, WORKER_SAYS) as service:
            connect(service).close()

    asyncio.run(cell())


def test_a_driver_that_ends():
    with Service(SECRET, lambda *event: None, WORKER_SAYS) as service:
        link = DriverLink(f"127.0.0.1:{service.port}", SECRET, 0, None)
    for _ in range(2):      # a script that tries again
        with pytest.raises(ValueError, match="The driver of the elastic job has closed the connection"):
            link.join()
    with pytest.raises(ValueError, match="does not answer at"):
        DriverLink(f"127.0.0.1:{service.port}", SECRET, 0, None)


def test_wrong_secret(service):
    with pytest.raises(channel.NotAuthenticated):
        connect(service, b"t" * 32)
    connection = connect(service)       # other peers are still served
    connection.send(Hello(0))
    connection.send(Synced())
    assert event(service)[:2] == ("synced", 0)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 10, b"\0" * 200, channel._MAGIC + b"n" * 32 + b"p" * 32])
def test_strangers_learn_nothing_and_cause_nothing(service, data):
    with socket.create_connection(("127.0.0.1", service.port), 10) as stranger:
        stranger.sendall(data)
        received = b""
        while True:
            try:
                more = stranger.recv(4096)
            except ConnectionResetError:
                break
            if not more:
                break
            received += more
        # At most a hello and a proof are read.
        assert len(received) <= channel.HELLO_SIZE + channel.PROOF_SIZE
    assert service.events.empty()


def test_a_reflected_proof_is_none():
    side = channel.Handshake(SECRET, channel.CONNECTED, 4242)
    proof = side.proof(side.hello)     # the peer sends the bytes that it received
    with pytest.raises(channel.NotAuthenticated):
        side.check(proof)
    other = channel.Handshake(SECRET, channel.ACCEPTED, 4242)
    right = other.proof(side.hello)
    side.proof(other.hello)
    side.check(right)


def test_a_handshake_that_is_passed_on_to_another_port_proves_nothing():
    side = channel.Handshake(SECRET, channel.CONNECTED, 4242)
    other = channel.Handshake(SECRET, channel.ACCEPTED, 4243)
    to_other, to_side = side.proof(other.hello), other.proof(side.hello)
    for receiver, proof in ((side, to_side), (other, to_other)):
        with pytest.raises(channel.NotAuthenticated):
            receiver.check(proof)


@pytest.mark.parametrize("line", [b"x" * (channel.MESSAGE_MAX + 10), b"[1]\n", b"{\n", b"\xff\n"])
def test_nonsense_ends_the_connection(service, line):
    connection = worker_2(service)
    connection.socket.sendall(line)
    assert connection.receive(Synced) is None
    assert event(service) == ("disconnected", 2, None)


def test_one_connection_for_each_worker(service):
    first, second = worker_2(service), connect(service)
    second.send(Hello(2))
    assert second.receive(Synced) is None
    first.send(Synced())
    assert event(service)[:2] == ("synced", 2)


def test_a_further_connection_ends_the_one_that_is_said_to_be_broken(service):
    first, second = worker_2(service), connect(service)
    second.send(Hello(2, again=True))
    assert first.receive(Synced) is None
    second.send(Synced())
    assert event(service)[:2] == ("synced", 2)
    service.send(2, Removed())
    assert second.receive(Removed) == Removed()


def test_a_member_tries_to_connect_more_than_once(monkeypatch):
    events = queue.Queue()
    with Service(SECRET, lambda *event: events.put(event), WORKER_SAYS) as service:
        link = DriverLink(f"127.0.0.1:{service.port}", SECRET, 3, None)
        link.send_to_driver(Synced())
        assert events.get(timeout=10) == ("synced", 3, Synced())
        service.send(3, Assignment(PLACE, "elastic.1", True, False))
        link.join()
    link.send_to_driver(Synced())
    time.sleep(1.5)         # it has retried
    monkeypatch.setenv("BAGUA_HVD_PORTS", str(service.port))
    events = queue.Queue()
    with Service(SECRET, lambda *event: events.put(event), WORKER_SAYS) as again:
        assert again.port == service.port
        assert events.get(timeout=10) == ("synced", 3, Synced())
        assert events.get(timeout=10) == ("ping", 3, Ping())        # a Ping of the driver may have been lost


HOST = """
import sys, time
from bagua_hvd.job import channel
from bagua_hvd.job.elastic_worker import WORKER_SAYS, Synced
from bagua_hvd.job.channel import Hello
from bagua_hvd.job.server import Service
if sys.argv[1] == "driver":
    with Service(b"s" * 32, lambda *event: print(*event[:2], flush=True), WORKER_SAYS, "10.0.0.1") as service:
        print(service.port, flush=True)
        time.sleep(600)
connection = channel.Connection("10.0.0.1", int(sys.argv[1]), b"s" * 32, 10)
connection.send(Hello(5))
connection.send(Synced())
print("up", flush=True)
print("hung up", connection.receive(Synced), flush=True)
"""


@pytest.mark.timeout(120)
def test_both_ends_notice_within_seconds_that_a_host_has_vanished(namespaces):
    # A silent host is given up after twice the longer limit plus 10 s.
    limits = {"BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS": "5", "HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}

    def start(host, argument):
        return subprocess.Popen([*namespaces.enter(host), sys.executable, "-c", HOST, argument], stdout=subprocess.PIPE,
                                text=True, cwd=ROOT, env={**os.environ, **limits})

    with start(0, "driver") as driver:
        with start(1, driver.stdout.readline().strip()) as worker:
            try:
                assert (worker.stdout.readline(), driver.stdout.readline()) == ("up\n", "synced 5\n")
                namespaces.cut(1)
                cut = time.monotonic()
                assert worker.stdout.readline() == "hung up None\n" and driver.stdout.readline() == "disconnected 5\n"
                assert 5 < time.monotonic() - cut < 60       # with the system's keep-alive it takes hours
            finally:
                worker.kill()
                driver.kill()


def test_the_longest_heartbeat_limit_is_one_that_the_kernel_takes(monkeypatch):
    monkeypatch.setenv("BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS", "2000000")
    with socket.socket() as connection:
        channel.enable_keepalive(connection)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2**31 - 1
