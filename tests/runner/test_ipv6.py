"""Jobs on hosts with IPv6 addresses, with or without IPv4."""
import json
import secrets
import subprocess
import sys
from base64 import b64encode

import pytest

from bagua_hvd.job.rendezvous import Rendezvous
from launcher import ROOT
from ports import has_ipv6
from ssh_hosts import Namespaces

pytestmark = pytest.mark.timeout(300)

# Every rank sends 600000 bytes of its own to every other one; then prints its place and addresses.
EXCHANGE = """
import hashlib, json, os, sys
from bagua_hvd.core import objects
from bagua_hvd.job import basics as hvd
from bagua_hvd.job.runtime import runtime
hvd.init()
def data(rank):
    return hashlib.shake_256(bytes([rank])).digest(600_000)
found = objects.allgather_object(hvd.context(), data(hvd.rank()), "all")
assert found == [data(rank) for rank in range(hvd.size())]
options = runtime.options
sys.stdout.write(json.dumps([hvd.rank(), hvd.size(), os.environ.get("HOROVOD_GLOO_IFACE"), options.listen_host,
                             options.rendezvous_host]) + "\\n")
"""


@pytest.fixture
def hosts(request, tmp_path_factory):
    """Namespaces with these address families."""
    made = Namespaces(tmp_path_factory.mktemp("namespaces"), len(request.param), request.param)
    yield made
    made.close()


def run(launcher, hosts, *arguments, **variables):
    """The ranks' output lines, in rank order."""
    done = launcher.run(*arguments, sys.executable, "-c", EXCHANGE, prefix=hosts.enter(0), timeout=200,
                        env={**hosts.environment, "HOROVOD_START_TIMEOUT": "100", **variables})
    assert done.returncode == 0, done.stderr
    return sorted(json.loads(line.partition(">:")[2]) for line in done.stdout.splitlines() if ">:[" in line)


@pytest.mark.parametrize("hosts", [["6", "6"]], indirect=True)
def test_two_hosts_without_ipv4(launcher, hosts):
    """One host's name is an address."""
    assert run(launcher, hosts, "-np", 4, "-H", "h0:2,[fd00::2]:2") == [
        [rank, 4, "eth0", f"fd00::{rank // 2 + 1}", "fd00::1"] for rank in range(4)]


@pytest.mark.long
@pytest.mark.parametrize("hosts", [["6", "6", "6"]], indirect=True)
def test_an_elastic_job_without_ipv4(launcher, hosts):
    """The ranks on the launcher's host connect to it through loopback."""
    assert run(launcher, hosts, "-np", 3, "--min-np", 3, "-H", "h0:1,h1:1,[fd00::3]:1") == [
        [0, 3, "eth0", "fd00::1", "127.0.0.1"], [1, 3, "eth0", "fd00::2", "fd00::1"],
        [2, 3, "eth0", "fd00::3", "fd00::1"]]


@pytest.mark.long
@pytest.mark.parametrize("elastic", [[], ["--min-np", 3]], ids=["static", "elastic"])
@pytest.mark.parametrize("hosts, expected", [
    (["46", "46", "46"], [("eth0", "10.0.0.1"), ("eth0", "10.0.0.2"), ("eth0", "10.0.0.3")]),
    (["46", "6", "46"], [("fd00::1%eth0", "fd00::1"), ("eth0", "fd00::2"), ("fd00::3%eth0", "fd00::3")]),
    # A host with only IPv6 cannot reach one with only IPv4, so the others need both.
    (["46", "46", "6"], [("fd00::1%eth0", "fd00::1"), ("fd00::2%eth0", "fd00::2"), ("eth0", "fd00::3")])],
    indirect=["hosts"], ids=["both", "one without IPv4", "the last without IPv4"])
def test_ipv4_where_all_have_it(launcher, hosts, expected, elastic):
    found = run(launcher, hosts, "-np", 3, *elastic, "-H", "h0:1,h1:1,h2:1")
    assert [(interface, address) for _, _, interface, address, _ in found] == expected


@pytest.mark.long
@pytest.mark.parametrize("hosts", [["46", "46"]], indirect=True)
def test_a_network_that_lets_only_ipv6_through(launcher, hosts):
    hosts.separate(0, 1)
    found = run(launcher, hosts, "-np", 2, "-H", "h0:1,[fd00::2]:1")
    assert [address for _, _, _, address, _ in found] == ["fd00::1", "fd00::2"]


def _start_by_hand(rank, port, address, secret, prefix=(), **variables):
    given = {"HOROVOD_RANK": rank, "HOROVOD_SIZE": 2, "HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "PYTHONPATH": ROOT,
             "HOROVOD_GLOO_RENDEZVOUS_PORT": port, "_HOROVOD_SECRET_KEY": b64encode(secret).decode(), **variables}
    return subprocess.Popen([*prefix, "env", *(f"{name}={value}" for name, value in given.items()),
                             sys.executable, "-c", EXCHANGE], stdout=subprocess.PIPE)


def _said(popens):
    return [json.loads(popen.communicate(timeout=100)[0]) for popen in popens]


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_init_by_hand():
    secret = secrets.token_bytes(32)
    with Rendezvous(secret, "::1") as rendezvous:
        popens = [_start_by_hand(rank, rendezvous.port, "::1", secret, BAGUA_HVD_TRANSPORT="tcp") for rank in range(2)]
        assert _said(popens) == [[rank, 2, None, "::1", "::1"] for rank in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("hosts", [["6", "6"]], indirect=True)
def test_init_by_hand_with_a_name(tmp_path, hosts):
    """The name is defined in /etc/hosts."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\nfd00::1 meeting\n")
    for i in range(2):
        subprocess.run([*hosts.enter(i), "mount", "--bind", tmp_path / "hosts", "/etc/hosts"], check=True)
    secret = secrets.token_bytes(32)
    serve = ("import sys; from bagua_hvd.job.rendezvous import Rendezvous; r = Rendezvous(bytes.fromhex(sys.argv[1]), "
             "'::'); print(r.port, flush=True); sys.stdin.read()")
    server = subprocess.Popen([*hosts.enter(0), "env", f"PYTHONPATH={ROOT}", sys.executable, "-c", serve, secret.hex()],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    port = int(server.stdout.readline())
    found = _said([_start_by_hand(rank, port, "meeting", secret, hosts.enter(rank)) for rank in range(2)])
    assert found == [[rank, 2, None, f"fd00::{rank + 1}", "fd00::1"] for rank in range(2)]
    server.communicate(timeout=60)
