"""Three hosts in network namespaces with a faulty network: pairs without a connection, cuts, several interfaces."""
import itertools
import re
import subprocess
import sys
import time

import pytest

from launcher import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

# Every rank sends to every other one, which opens all links.
EXCHANGE = """
import os, socket, time
from bagua_hvd.core import objects
from bagua_hvd.job import basics as hvd
hvd.init()
for step in range(int(os.environ.get("STEPS", "1"))):
    if step == 1:
        print("begun", flush=True)
    nbytes = int(os.environ.get("NBYTES", "8"))
    assert list(map(len, objects.allgather_object(hvd.context(), b"1" * nbytes, f"step {step}"))) == [nbytes] * 3
    time.sleep(float(os.environ.get("PAUSE", "0")))
print("done", hvd.rank(), socket.gethostname(), os.environ["HOROVOD_GLOO_IFACE"], flush=True)
"""
LATE = """
import time
from bagua_hvd.core import objects
from bagua_hvd.job import basics as hvd
hvd.init()
if hvd.rank() == 0:
    print("ready", flush=True)
time.sleep(4)
objects.allgather_object(hvd.context(), "x" * 5000000, "all")
"""
PAIRS = list(itertools.combinations(range(3), 2))
ORDERS = [",".join(f"h{i}:1" for i in order) for order in itertools.permutations(range(3))]


def run(launcher, namespaces, *arguments, timeout=100, **variables):
    popen = launcher.start(*arguments, sys.executable, "-c", EXCHANGE, prefix=namespaces.enter(0),
                           env={**namespaces.environment, "HOROVOD_START_TIMEOUT": "60", **variables})
    stdout, stderr = popen.communicate(timeout=timeout)
    assert launcher.processes() == []
    return subprocess.CompletedProcess(popen.args, popen.returncode, stdout.decode(), stderr.decode())


@pytest.mark.parametrize("silently", [False, True], ids=["refused", "dropped"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_a_pair_of_hosts_that_do_not_reach_each_other_is_named(launcher, namespaces, order, pair, silently):
    """In two of three cases the launcher's host is one of the pair; then ssh reports it."""
    namespaces.separate(*pair, silently=silently)
    done = run(launcher, namespaces, "-np", 3, "-H", order, HOROVOD_START_TIMEOUT="12")
    assert done.returncode == 1
    if 0 in pair:
        # Either ssh fails first, or baguarun's limit ends the attempt.
        assert re.search(rf"host h{max(pair)} (cannot be reached|did not answer within 12 s)", done.stderr), done.stderr
    else:
        assert any(f"host h{one} reaches host h{other} at none of 10.0.0.{other + 1} (eth0), 127.0.0.1 (lo)"
                   in done.stderr for one, other in (pair, pair[::-1]))


@pytest.mark.parametrize("silently", [False, True], ids=["refused", "dropped"])
def test_a_pair_that_is_closed_later_is_named(launcher, namespaces, silently):
    popen = launcher.start("-np", 3, "-H", "h0:1,h1:1,h2:1", sys.executable, "-c", LATE, prefix=namespaces.enter(0),
                           env={**namespaces.environment, "HOROVOD_START_TIMEOUT": "60",
                                "BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS": "8"})
    while b"ready" not in popen.stdout.readline():
        assert popen.poll() is None
    namespaces.separate(1, 2, silently)
    _, stderr = popen.communicate(timeout=100)
    text = stderr.decode()
    assert popen.returncode == 1
    pair = re.search(r"rank ([12]) was lost: its host acknowledged nothing for [\d.]+ s of what rank ([12]) sent", text)
    assert pair and pair[1] != pair[2], text
    # Either rank may notice first, or both: a rank that learns of its own loss reports that others lost it.
    errors = re.findall(r"\[(\d)\]<stderr>:bagua_hvd\S+Error: (.*)", text)
    assert {"1", "2"} <= {rank for rank, _ in errors}, text
    for rank, error in errors:
        own = f"rank {rank} was lost" in error
        assert own == error.startswith(f"the other ranks go on without rank {rank}: "), error


@pytest.mark.parametrize("limit", [10, 120])
@pytest.mark.parametrize("seconds", [5, 20, 60])
def test_a_cut_ends_the_job_when_the_limits_say_so(launcher, namespaces, seconds, limit):
    popen = launcher.start("-np", 3, "-H", "h0:1,h1:1,h2:1", sys.executable, "-c", EXCHANGE,
                           prefix=namespaces.enter(0), env={
                               **namespaces.environment, "HOROVOD_START_TIMEOUT": "60", "STEPS": "40", "PAUSE": ".2",
                               "BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS": str(limit),
                               "HOROVOD_GLOO_TIMEOUT_SECONDS": str(limit)})
    while b"begun" not in popen.stdout.readline():
        assert popen.poll() is None
    namespaces.cut(2)
    time.sleep(seconds)
    namespaces.mend(2)
    stdout, stderr = popen.communicate(timeout=300)
    if seconds < limit:
        assert popen.returncode == 0, stderr.decode()
        assert stdout.count(b"done") == 3
    else:
        assert popen.returncode == 1 and b"was lost: " in stderr, stderr.decode()
    wait_until(lambda: not launcher.processes(), 120)


@pytest.mark.parametrize("elastic", [False, True], ids=["static", "elastic"])
@pytest.mark.parametrize("order", ORDERS)
def test_an_address_serves_all_hosts(launcher, namespaces, order, elastic):
    """Two hosts cannot reach each other on the network that each lists first, but on the one that connects all."""
    namespaces.network("data", [0, 1, 2])
    namespaces.separate(1, 2)
    done = run(launcher, namespaces, "-np", 3, *(["--min-np", 3] if elastic else []), "-H", order)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[-2:] for line in done.stdout.splitlines() if "done" in line) == [
        ["h0", "eth0"], ["h1", "data"], ["h2", "data"]]


@pytest.mark.parametrize("elastic", [False, True], ids=["static", "elastic"])
def test_the_users_interface_carries_the_data(launcher, namespaces, elastic):
    namespaces.network("data", [0, 1, 2])
    before = [namespaces.received(0, name) for name in ("eth0", "data")]
    done = run(launcher, namespaces, "-np", 3, *(["--min-np", 3] if elastic else []), "-H", ORDERS[0],
               HOROVOD_GLOO_IFACE="data", NBYTES="10000000")
    assert done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines() if "done" in line] == ["data"] * 3
    eth0, data = (namespaces.received(0, name) - was for name, was in zip(("eth0", "data"), before, strict=True))
    assert eth0 < 3_000_000 and data > 10_000_000


@pytest.mark.parametrize("elastic", [False, True], ids=["static", "elastic"])
def test_an_interface_that_a_host_lacks_is_refused(launcher, namespaces, elastic):
    namespaces.network("data", [0, 1])
    done = run(launcher, namespaces, "-np", 3, *(["--min-np", 3] if elastic else []), "-H", ORDERS[0],
               HOROVOD_GLOO_IFACE="data")
    assert done.returncode != 0
    assert "host h2 has no interface of data with an IPv4 or global IPv6 address" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("elastic", [False, True], ids=["static", "elastic"])
def test_a_firewall_that_lets_one_range_through(launcher, namespaces, elastic):
    namespaces.open_only(20000, 20007)
    arguments = "-np", 3, *(["--min-np", 3] if elastic else []), "-H", ORDERS[0]
    done = run(launcher, namespaces, *arguments, BAGUA_HVD_PORTS="20000-20007")
    assert done.returncode == 0 and done.stdout.count("done") == 3, done.stderr
    refused = run(launcher, namespaces, *arguments, HOROVOD_START_TIMEOUT="12")
    assert refused.returncode == 1
