"""Two hosts with a tunnel of wireguard-go, set up as in docs/security.md: the ranks' data goes through it."""
import json
import shutil
import subprocess
import sys
from contextlib import ExitStack

import pytest

from launcher import wait_until
from ssh_hosts import Namespaces

pytestmark = [
    pytest.mark.long, pytest.mark.timeout(300),
    pytest.mark.skipif(not (shutil.which("wireguard-go") and shutil.which("wg")), reason="needs wireguard-go and wg")]

NBYTES = 16 << 20
# Mean seconds of an allreduce of NBYTES; each result is checked.
ALLREDUCES = f"""
import json, sys, time
import torch
import bagua_hvd.torch as hvd
from bagua_hvd.job.runtime import runtime
hvd.init()
ones = torch.arange({NBYTES} // 4, dtype=torch.float32) % 1000 + hvd.rank()
expected = torch.arange({NBYTES} // 4, dtype=torch.float32) % 1000 * 2 + 1
seconds = []
for _ in range(6):
    began = time.perf_counter()
    found = hvd.allreduce(ones, op=hvd.Sum, name="sum")
    seconds.append(time.perf_counter() - began)
    assert torch.equal(found, expected)
sys.stdout.write(json.dumps([hvd.rank(), runtime.options.listen_host, sorted(seconds)[3]]) + "\\n")
"""


@pytest.fixture
def hosts(tmp_path_factory):
    """Two Namespaces with wg0, 10.99.0.1 and 10.99.0.2."""
    folder = tmp_path_factory.mktemp("namespaces")
    made = Namespaces(folder, 2)
    with ExitStack() as stack:
        stack.callback(made.close)

        def call(i, *command, **options):
            return subprocess.run([*made.enter(i), *command], check=True, text=True, stdout=subprocess.PIPE,
                                  **options).stdout.strip()

        public = []
        for i in range(2):
            # For its control socket: the hosts share a file system.
            call(i, "sh", "-c", "mkdir -p /var/run/wireguard && mount -t tmpfs tmpfs /var/run/wireguard")
            tunnel = subprocess.Popen([*made.enter(i), "wireguard-go", "-f", "wg0"], stderr=subprocess.DEVNULL)
            stack.callback(tunnel.wait)
            stack.callback(tunnel.kill)
            key = call(i, "wg", "genkey")
            (folder / f"key{i}").write_text(key)
            public.append(call(i, "wg", "pubkey", input=key))
        for i in range(2):
            shows = [*made.enter(i), "wg", "show", "wg0"]
            wait_until(lambda shows=shows: subprocess.run(shows, capture_output=True).returncode == 0)
            call(i, "wg", "set", "wg0", "listen-port", "51820", "private-key", str(folder / f"key{i}"), "peer",
                 public[1 - i], "allowed-ips", f"10.99.0.{2 - i}/32", "endpoint", f"10.0.0.{2 - i}:51820")
            call(i, "ip", "address", "add", f"10.99.0.{i + 1}/24", "dev", "wg0")
            call(i, "ip", "link", "set", "wg0", "mtu", "1420", "up")
        yield made


def run(launcher, hosts, interface):
    """Seconds of an allreduce over an interface, and the bytes that h1 received by wg0 and eth0 during it."""
    names = "wg0", "eth0"
    before = [hosts.received(1, name) for name in names]
    done = launcher.run("-np", 2, "-H", "h0:1,h1:1", "--network-interfaces", interface, sys.executable, "-c",
                        ALLREDUCES, prefix=hosts.enter(0), timeout=200,
                        env={**hosts.environment, "HOROVOD_START_TIMEOUT": "100"})
    assert done.returncode == 0, done.stderr
    ranks = sorted(json.loads(line.partition(">:")[2]) for line in done.stdout.splitlines() if ">:[" in line)
    prefix = {"wg0": "10.99.0", "eth0": "10.0.0"}[interface]
    assert [address for _, address, _ in ranks] == [f"{prefix}.1", f"{prefix}.2"]
    return ranks[0][2], *(hosts.received(1, name) - was for name, was in zip(names, before, strict=True))


def test_data_goes_through_the_tunnel(launcher, hosts):
    seconds, tunnel, outside = run(launcher, hosts, "wg0")
    assert tunnel > 6 * NBYTES
    assert tunnel < outside < 1.3 * tunnel        # encrypted, with headers, once; otherwise eth0 carries only ssh
    plain, tunnel, outside = run(launcher, hosts, "eth0")
    assert tunnel < 1 << 20 and outside > 6 * NBYTES
    print(f"an allreduce of {NBYTES >> 20} MiB: {seconds:.3f} s by wg0, {plain:.3f} s by eth0")
