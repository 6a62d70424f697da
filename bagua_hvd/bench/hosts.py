"""Several hosts on one Linux machine: network namespaces on one bridge, both directions of each link shaped to a rate.

Ranks in different namespaces cannot reach each other but through their links, and the core takes them for ranks of
different hosts. Only the rate is shaped, not the delay. Needs root and iproute2 (`ip`, `tc`).

As a program, `python -m bagua_hvd.bench.hosts COMMAND...`: becomes the command, in the namespace of its rank's host.
"""
import base64
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from contextlib import contextmanager

from bagua_hvd.job.rendezvous import Rendezvous

VARIABLE = "BAGUA_BENCH_HOSTS"
PREFIX = "bagua-bench-"
# tbf: what a burst may hold, and how long a packet may wait before it is dropped.
BURST, LATENCY = "256kb", "50ms"


def why_impossible():
    """Why there can be no hosts on this machine, or None."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"--hosts needs {' and '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed: " \
               "install iproute2"
    if os.geteuid() != 0:
        return "--hosts makes network namespaces, which only root may: run it with sudo"
    return None


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


class Hosts:
    """`count` hosts, from construction to close(); a context manager.

    Args:
        rate: of every link, as tc writes it (100mbit, 1gbit, 10gbit), or "none": not shaped.
    """

    def __init__(self, count, rate):
        _remove_left_behind()
        self.count = count
        self.names = [f"{PREFIX}{os.getpid()}-{index}" for index in range(count)]
        self._bridge = f"bg{os.getpid()}"
        self._net = _unused_net()
        self.address = f"{self._net}.254"
        try:
            self._up(rate)
        except BaseException:
            self.close()
            raise

    def _up(self, rate):
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "address", "add", f"{self.address}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        for index, name in enumerate(self.names):
            link = f"{self._bridge}v{index}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", link, "master", self._bridge, "up")
            _run("ip", "-n", name, "address", "add", f"{self.address_of(index)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            if rate != "none":
                shape = ("root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY)
                _run("tc", "qdisc", "add", "dev", link, *shape)
                _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *shape)

    def address_of(self, index):
        """The IPv4 address of a host's eth0."""
        return f"{self._net}.{index + 1}"

    def close(self):
        """Removes everything. Idempotent."""
        _remove(self.names, self._bridge)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    @contextmanager
    def job(self, size):
        """The variables that spread the `size` ranks of one job evenly, block by block, over the hosts."""
        secret = secrets.token_bytes(32)
        with Rendezvous(secret, self.address) as rendezvous:
            yield {VARIABLE: json.dumps({
                "names": self.names, "per_host": size // self.count, "port": rendezvous.port, "address": self.address,
                "secret": base64.b64encode(secret).decode(),
            })}


def _unused_net():
    """A part of 198.18.0.0/15, which is reserved for measurements (RFC 2544): its first three numbers.

    Two processes that choose at the same moment begin to look at different ones.
    """
    used = {int(number) for number in re.findall(r"\b198\.18\.(\d+)\.254/24", _run("ip", "-4", "address", "show"))}
    unused = [number % 256 for number in range(os.getpid(), os.getpid() + 256) if number % 256 not in used]
    if not unused:
        raise RuntimeError("--hosts found no unused network in 198.18.0.0/16: end other measurements first")
    return f"198.18.{unused[0]}"


def _remove(names, bridge):
    """What exists of these namespaces, with the links into them, and the bridge."""
    for name in names:
        # Its end of a veth goes with a namespace, and the other end with it.
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    subprocess.run(["ip", "link", "delete", bridge], capture_output=True)


def _remove_left_behind():
    """What a measurement that was killed could not remove."""
    owners: dict[str, list[str]] = {}
    for name in re.findall(rf"^{PREFIX}\d+-\d+", _run("ip", "netns", "list"), re.MULTILINE):
        owners.setdefault(name[len(PREFIX):].split("-")[0], []).append(name)
    for pid, names in owners.items():
        if not os.path.exists(f"/proc/{pid}"):
            _remove(names, f"bg{pid}")


def _environment(hosts, rank, size):
    """What differs for a rank from the environment that its launcher, which knows one host only, gave it."""
    per_host = hosts["per_host"]
    return {
        "HOROVOD_LOCAL_RANK": str(rank % per_host), "HOROVOD_LOCAL_SIZE": str(per_host),
        "HOROVOD_CROSS_RANK": str(rank // per_host), "HOROVOD_CROSS_SIZE": str(size // per_host),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": hosts["address"], "HOROVOD_GLOO_RENDEZVOUS_PORT": str(hosts["port"]),
        "_HOROVOD_SECRET_KEY": hosts["secret"],
        "HOROVOD_GLOO_IFACE": "eth0", "GLOO_SOCKET_IFNAME": "eth0",
    }


def mpi_environment(hosts):
    """Makes MPICH take the ranks of different namespaces for those of different hosts, and use their links."""
    return {
        "MPIR_CVAR_NUM_CLIQUES": str(hosts.count), "MPIR_CVAR_CLIQUES_BY_BLOCK": "1",
        "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0", "UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0",
    }


def main(command):
    """Does not return."""
    hosts = json.loads(os.environ[VARIABLE])
    size = hosts["per_host"] * len(hosts["names"])
    rank = int(os.environ.get("HOROVOD_RANK") or os.environ["PMI_RANK"])
    os.environ.update(_environment(hosts, rank, size))
    os.execvp("ip", ["ip", "netns", "exec", hosts["names"][rank // hosts["per_host"]], *command])


if __name__ == "__main__":
    main(sys.argv[1:])
