"""The rendezvous with many ranks, each a thread: what they get, and how errors reach all of them."""
import asyncio
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest

import attacks
from bagua_hvd.core import native
from bagua_hvd.core.context import Context
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job import channel
from bagua_hvd.job.environment import Options
from bagua_hvd.job.rendezvous import Register, Rendezvous, gather_endpoints
from bagua_hvd.job.server import listen
from launcher import wait_until

SECRET = b"a secret of tests"
RANKS_MAX = 64


@pytest.fixture
def rendezvous():
    with Rendezvous(SECRET) as running:
        yield running


@pytest.fixture
def pool():
    with ThreadPoolExecutor(RANKS_MAX) as threads:
        yield threads


def come(port, rank, size, scope="init.1", endpoint=None, seconds=30, secret=SECRET):
    options = Options(rank=rank, size=size, scope=scope, rendezvous_host="127.0.0.1", rendezvous_port=port,
                      secret=secret, start_timeout_ms=int(1000 * seconds))
    return gather_endpoints(options, endpoint or f"{scope} {rank:4}".encode())


def message(coming, status=None):
    """Of the error that a rank gets, with this status."""
    with pytest.raises(HorovodInternalError) as raised:
        coming.result(60)
    assert status in (None, raised.value.status)
    return str(raised.value)


def waits(rendezvous, count, scope="init.1"):
    wait_until(lambda: scope in rendezvous._scopes and len(rendezvous._scopes[scope].endpoints) == count, 30)


def test_every_rank_gets_all_endpoints_in_order(rendezvous, pool):
    for _ in range(3):          # the same name
        everything = b"".join(f"init.1 {rank:4}".encode() for rank in range(RANKS_MAX))
        ranks = random.sample(range(RANKS_MAX), RANKS_MAX)
        assert list(pool.map(lambda rank: come(rendezvous.port, rank, RANKS_MAX), ranks)) == [everything] * RANKS_MAX
    assert not rendezvous._scopes


def test_scopes_do_not_mix(rendezvous, pool):
    coming = {(scope, rank): pool.submit(come, rendezvous.port, rank, 4, f"scope.{scope}")
              for rank in range(4) for scope in range(8)}
    for (scope, _), one in coming.items():
        assert one.result(60) == b"".join(f"scope.{scope} {rank:4}".encode() for rank in range(4))


def test_endpoints_of_other_versions_are_cut_or_filled(rendezvous, pool):
    longer = pool.submit(come, rendezvous.port, 0, 2, endpoint=b"longer")
    assert come(rendezvous.port, 1, 2, endpoint=b"one") == b"lonone" and longer.result() == b"longerone\0\0\0"


def test_ranks_may_come_before_the_server(pool):
    with listen("127.0.0.1", [0]) as free:
        port = free.getsockname()[1]
    coming = [pool.submit(come, port, rank, 2) for rank in range(2)]
    time.sleep(0.2)
    with Rendezvous(SECRET, port=port):
        assert coming[0].result(60) == coming[1].result(60)


def test_missing_ranks_are_named(rendezvous, pool):
    coming = [pool.submit(come, rendezvous.port, rank, 4, seconds=2.5) for rank in range(2)]
    for one in coming:
        assert message(one, native.lib.BHVD_ERR_TIMEOUT) == (
            "ranks 2, 3 of 4 did not arrive within 2.5 s (HOROVOD_START_TIMEOUT; scope init.1)")
    assert message(pool.submit(come, rendezvous.port, 0, 2, "init.2", seconds=1)) == (
        "rank 1 of 2 did not arrive within 1 s (HOROVOD_START_TIMEOUT; scope init.2)")
    assert "ranks 0, 1, 2, 4, 5, 6, 7, 8 and 16375 more of 16384 did" in message(
        pool.submit(come, rendezvous.port, 3, 16384, seconds=0.5))


def test_the_first_rank_that_ended_is_named(rendezvous, pool):
    early = pool.submit(come, rendezvous.port, 0, 3)
    waits(rendezvous, 1)
    rendezvous.rank_ended(2, 137, "init.0")     # of another scope
    rendezvous.rank_ended(7, 1)                 # of another size
    rendezvous.rank_ended(0, 1)                 # it has come
    rendezvous.rank_ended(1, 9)
    rendezvous.rank_ended(2, 1)
    sentence = "rank 1 of 3 has ended, with exit code 9, and did not call init() (scope init.1)"
    assert message(early, native.ERR_PEER_LOST) == sentence
    assert message(pool.submit(come, rendezvous.port, 0, 3)) == sentence        # it comes later


@pytest.mark.parametrize("rank, size, sentence", [
    (1, 3, "rank 1 expects 3 ranks in the job, other ranks expect 2 (scope init.1)"),
    (2, 2, "a process says it is rank 2 of 2; ranks are 0 to 1 (scope init.1)"),
    (0, 2, "two processes say they are rank 0 of 2 (scope init.1)"),
])
def test_every_rank_hears_of_a_disagreement(rendezvous, pool, rank, size, sentence):
    first = pool.submit(come, rendezvous.port, 0, 2)
    waits(rendezvous, 1)
    for one in (pool.submit(come, rendezvous.port, rank, size), first):
        assert message(one, native.ERR_MISMATCH).startswith(sentence)


def test_a_wrong_secret_is_named_at_once(rendezvous, pool):
    assert "the job's secret differs" in message(
        pool.submit(come, rendezvous.port, 0, 2, secret=b"another"), native.lib.BHVD_ERR_AUTH)
    with pytest.raises(RuntimeError, match="secret is empty"):
        Rendezvous(b"")


def test_a_server_that_is_absent_or_silent_is_named(pool):
    with listen("127.0.0.1", [0]) as silent:
        where = f"no rendezvous server answered at 127.0.0.1:{silent.getsockname()[1]} within 0.3 s (timed out)"
        assert where in message(pool.submit(come, silent.getsockname()[1], 0, 2, seconds=0.3))
    with listen("127.0.0.1", [0]) as closed:
        port = closed.getsockname()[1]
    assert (f"no rendezvous server answered at 127.0.0.1:{port} within 0.3 s (Connection refused): is the launcher "
            "running" in message(pool.submit(come, port, 0, 2, seconds=0.3), native.ERR_SYSTEM))


def test_close_ends_ranks_that_wait(rendezvous, pool):
    coming = [pool.submit(come, rendezvous.port, rank, 3) for rank in range(2)]
    waits(rendezvous, 2)
    rendezvous.close()
    for one in coming:
        assert "closed the connection before all ranks had arrived" in message(one, native.ERR_PEER_LOST)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", rendezvous.port), 5)


def test_close_first_sends_the_replies(rendezvous, pool, monkeypatch):
    """Rank 0 closes the rendezvous that it hosts when it has its own reply, and may end with the error in it."""
    wait, late = Rendezvous._wait, threading.Event()

    async def wait_longer(*arguments):
        await wait(*arguments)
        late.set()
        await asyncio.sleep(0.2)

    monkeypatch.setattr(Rendezvous, "_wait", wait_longer)
    coming = [pool.submit(come, rendezvous.port, 0, size) for size in (2, 3)]
    assert late.wait(30)
    rendezvous.close()
    assert all("other ranks expect" in message(one, native.ERR_MISMATCH) for one in coming)


def test_a_port_in_use_is_named(rendezvous):
    with pytest.raises(RuntimeError, match=str(rendezvous.port)):
        Rendezvous(SECRET, port=rendezvous.port)


@pytest.mark.parametrize("sent", [
    Register("", 0, 2, "", 1.0, 1.0), Register("s" * 256, 0, 2, "", 1.0, 1.0), Register("s", -1, 2, "", 1.0, 1.0),
    Register("s", 0, 0, "", 1.0, 1.0), Register("s", 0, 16385, "", 1.0, 1.0), Register("s", True, 2, "", 1.0, 1.0),
    Register("s", 0, 2, "00" * 4097, 1.0, 1.0), Register("s", 0, 2, "no hex", 1.0, 1.0),
    Register("s", 0, 2, "", "soon", 1.0), Register("s", 0, 2, "", float("nan"), 1.0)])
def test_requests_out_of_their_bounds_are_dropped(rendezvous, sent):
    connection = channel.Connection("127.0.0.1", rendezvous.port, SECRET, 10)
    connection.socket.settimeout(10)
    connection.send(sent)
    assert connection.receive() is None and not rendezvous._scopes
    connection.close()


def test_a_rank_that_hangs_up_may_come_again(rendezvous, pool):
    for sent in (b"", b"garbage"):
        connection = channel.Connection("127.0.0.1", rendezvous.port, SECRET, 10)
        connection.send(Register("init.1", 0, 2, "00", 30.0, 30.0))
        waits(rendezvous, 1)
        if sent:
            connection.socket.sendall(sent)
            assert connection.receive() is None
        connection.close()
        wait_until(lambda: not rendezvous._scopes, 30)
    again = pool.submit(come, rendezvous.port, 0, 2)
    assert come(rendezvous.port, 1, 2) == again.result(60)


def test_ranks_that_do_not_read_delay_nobody(rendezvous):
    """A reply of 4 MB, more than sockets hold."""
    size = 1000
    with ExitStack() as stack:
        for rank in range(size - 1):
            connection = channel.Connection("127.0.0.1", rendezvous.port, SECRET, 10)
            stack.callback(connection.close)
            connection.send(Register("init.1", rank, size, os.urandom(4096).hex(), 60.0, 60.0))
        assert len(come(rendezvous.port, size - 1, size, endpoint=bytes(4096))) == 4096 * size


def test_a_job_starts_among_strangers(rendezvous, pool):
    address = ("127.0.0.1", rendezvous.port)
    with attacks.idle(address, 300), attacks.idle(address, 50, attacks.hello_of()):
        attacks.scan(address, 50)
        coming = [pool.submit(come, rendezvous.port, rank, 8) for rank in range(8)]
        assert len({one.result(60) for one in coming}) == 1


def test_a_rank_dropped_before_its_proof_is_read_comes_again(rendezvous, pool, monkeypatch):
    """As in a flood of strangers. The server's proof has been sent by then."""
    dropped, check = [], channel.Handshake.check

    def check_of_strangers_first(self, proof):
        if self._role == channel.ACCEPTED and not dropped:
            dropped.append(self)
            raise EOFError
        check(self, proof)

    monkeypatch.setattr(channel.Handshake, "check", check_of_strangers_first)
    coming = [pool.submit(come, rendezvous.port, rank, 2) for rank in range(2)]
    assert len({one.result(60) for one in coming}) == 1
    assert dropped


def test_signals_are_served_while_a_rank_waits(rendezvous):
    class Stop(Exception):
        pass

    def handler(number, frame):
        raise Stop

    before = signal.signal(signal.SIGALRM, handler)
    options = Options(size=2, rendezvous_host="127.0.0.1", rendezvous_port=rendezvous.port, secret=SECRET)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(Stop):
            Context(options, partial(gather_endpoints, options))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
