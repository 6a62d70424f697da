import signal

import pytest

import ranks
from launcher import Launcher, wait_until
from ssh_hosts import Namespaces, SshHosts
from world import TRANSPORTS, World


@pytest.fixture
def run_ranks(tmp_path):
    """ranks.run_ranks in a folder of the test's own."""
    return lambda n, function, **options: ranks.run_ranks(tmp_path, n, function, **options)


@pytest.fixture
def launcher(tmp_path):
    """A Launcher; the test fails when a process is left behind."""
    # A test run in the background of a script has SIGINT ignored, and would hand that down.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    result = Launcher(tmp_path)
    try:
        yield result
    finally:
        left = result.close()
        signal.signal(signal.SIGINT, previous)
    assert not left, f"processes left behind: {left}"


@pytest.fixture
def ssh_hosts(tmp_path_factory):
    """SshHosts; the test fails when a process is left behind there."""
    hosts = SshHosts(tmp_path_factory.mktemp("ssh"))
    try:
        yield hosts
        wait_until(lambda: not hosts.left(), 15)
    finally:
        hosts.close()


@pytest.fixture
def namespaces(tmp_path_factory):
    """Namespaces: three hosts."""
    hosts = Namespaces(tmp_path_factory.mktemp("namespaces"), 3)
    yield hosts
    hosts.close()


# Every path an allreduce can take: over links on each transport, and through shared memory where there is some.
PATHS = [("inproc", ""), ("inproc", "ring"), ("shm", ""), ("shm", "ring"), ("tcp", "")]
assert {transport for transport, _ in PATHS} == set(TRANSPORTS)


@pytest.fixture(scope="module", params=[(*path, n) for path in PATHS for n in (1, 2, 3, 5, 8)],
                ids=lambda p: f"{p[0]}{'-' + p[1] if p[1] else ''}-{p[2]}")
def world(request):
    """n ranks as threads, on every path."""
    transport, path, n = request.param
    with World(n, transport, path) as w:
        yield w
