"""Several hosts on one Linux machine: network namespaces, with traffic shaping in both directions of each link.

Ranks in different namespaces can only reach each other over their links, and the core treats them as ranks of different
hosts. Needs root and iproute2 (`ip`, `tc`). There are two kinds of links:

    rate                veth devices on a bridge, shaped by the kernel's tbf: up to 10 Gbit/s and beyond
    rate and delay      TUN devices and a process that carries the packets (network.py): some Gbit/s in all

As a program, `python -m tests.laboratory.hosts COMMAND...` runs the command in the namespace of its rank's host.
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

from bagua_hvd.job.environment import get_env_rank_and_size
from bagua_hvd.job.rendezvous import Rendezvous
from tests.laboratory.network import Carrier, Link

VARIABLE = "BAGUA_BENCH_HOSTS"
PREFIX = "bagua-bench-"
# tbf: size of a burst, and how long a packet may wait before it is dropped.
BURST, LATENCY = "256kb", "50ms"
# Windows for 1 Gbit/s over 100 ms and more. Namespaces may lack cubic; without losses, reno behaves the same.
# Connections do not reuse metrics of earlier ones.
CARRIED = {"tcp_congestion_control": "reno", "tcp_rmem": "4096 131072 33554432", "tcp_wmem": "4096 65536 33554432",
           "tcp_no_metrics_save": 1}


def why_impossible():
    """The reason why hosts cannot be created on this machine, or None."""
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
    """`count` hosts, until close(); a context manager.

    Args:
        rate: of every link, in tc's notation (100mbit, 1gbit, 10gbit), or "none": not shaped.
        delay: one-way delay between hosts in milliseconds, which may be 0: a process delays packets; None: only the
            kernel forwards them, without delay.
    Attributes:
        carrier: that process, a network.Carrier, or None.
    """

    def __init__(self, count, rate, delay=None):
        _remove_left_behind()
        self.count = count
        self.names = [f"{PREFIX}{os.getpid()}-{index}" for index in range(count)]
        self._bridge = f"bg{os.getpid()}"
        self._net = _unused_net()
        self.address = f"{self._net}.254"
        self.carrier = None
        self._links = [Link(rate, rate, delay or 0.0) for _ in self.names]
        try:
            if delay is None:
                self._join_by_veth()
            else:
                self._join_by_carrier()
            for index, link in enumerate(self._links):
                self._shape(index, link)
        except BaseException:
            self.close()
            raise

    def _join_by_veth(self):
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        self._address(self._bridge, self.address)
        for index, name in enumerate(self.names):
            link = _bridge_end(self._bridge, index)
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", link, "master", self._bridge, "up")
            self._address("eth0", self.address_of(index), name)

    def _join_by_carrier(self):
        for name in self.names:
            _run("ip", "netns", "add", name)
        # This process's own end, for the rendezvous, is one more host, without a shaped link.
        self.address = self.address_of(self.count)
        self.carrier = Carrier([*((name, "eth0") for name in self.names), ("", self._bridge)])
        for index, name in enumerate(self.names):
            self._address("eth0", self.address_of(index), name)
            # Independent of this machine's settings.
            for variable, value in CARRIED.items():
                _run("ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv4.{variable}={value}")
        self._address(self._bridge, self.address)

    def _address(self, device, address, name=None):
        inside = ["-n", name] if name else []
        _run("ip", *inside, "address", "add", f"{address}/24", "dev", device)
        _run("ip", *inside, "link", "set", device, "txqueuelen", "10000", "up")
        if name:
            _run("ip", *inside, "link", "set", "lo", "up")

    def change(self, host=None, **what):
        """Changes the link of a host, or of all hosts, at run time.

        Args:
            what: rate, of both directions; up, down: of one; delay: milliseconds, if there was one from the start.
        """
        if "rate" in what:
            what["up"] = what["down"] = what.pop("rate")
        for index in range(self.count) if host is None else [host]:
            self._links[index] = link = self._links[index]._replace(**what)
            self._shape(index, link)

    def _shape(self, index, link):
        if self.carrier:
            self.carrier.set(index, link)
            return
        if link.delay:
            raise ValueError("these hosts were made without a delay: give one, or 0, from the start")
        _shape(["tc", "-n", self.names[index]], "eth0", link.up)
        _shape(["tc"], _bridge_end(self._bridge, index), link.down)

    def address_of(self, index):
        """The IPv4 address of a host's eth0."""
        return f"{self._net}.{index + 1}"

    def close(self):
        """Removes everything. Idempotent."""
        if self.carrier:
            self.carrier.close()
        _remove(self.names, self._bridge)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def command(self, rank):
        """The command that runs `rank`, a rank's command, in the namespace of its host."""
        return [sys.executable, "-m", "tests.laboratory.hosts", *rank]

    @contextmanager
    def job(self, size, backend="bagua"):
        """The variables that distribute a job's `size` ranks evenly, in blocks, over the hosts."""
        secret = secrets.token_bytes(32)
        with Rendezvous(secret, self.address) as rendezvous:
            yield {VARIABLE: json.dumps({
                "names": self.names, "per_host": size // self.count, "port": rendezvous.port, "address": self.address,
                "secret": base64.b64encode(secret).decode(),
            }), **(mpi_environment(self) if backend == "mpi" else {})}


def _bridge_end(bridge, index):
    """The name of a veth's end outside of its host."""
    return f"{bridge}v{index}"


def _shape(tc, device, rate):
    if rate == "none":
        subprocess.run([*tc, "qdisc", "delete", "dev", device, "root"], capture_output=True)      # there may be none
    else:
        _run(*tc, "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY)


def _unused_net():
    """The first three numbers of a free part of 198.18.0.0/15, which is reserved for measurements (RFC 2544).

    Two processes that choose simultaneously start their search at different ones.
    """
    used = {int(number) for number in re.findall(r"\b198\.18\.(\d+)\.\d+/24", _run("ip", "-4", "address", "show"))}
    unused = [number % 256 for number in range(os.getpid(), os.getpid() + 256) if number % 256 not in used]
    if not unused:
        raise RuntimeError("--hosts found no unused network in 198.18.0.0/16: end other measurements first")
    return f"198.18.{unused[0]}"


def _remove(names, bridge):
    """Removes these namespaces as far as they exist, with the links into them, and the bridge."""
    for name in names:
        # A namespace exists until the last process and socket in it end, with its devices and their other ends, whose
        # names the next hosts need. A TUN device has no other end.
        subprocess.run(["ip", "link", "delete", _bridge_end(bridge, name.rpartition("-")[2])], capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    subprocess.run(["ip", "link", "delete", bridge], capture_output=True)


def _remove_left_behind():
    """Removes the hosts of a measurement that was killed."""
    owners: dict[str, list[str]] = {}
    for name in re.findall(rf"^{PREFIX}\d+-\d+", _run("ip", "netns", "list"), re.MULTILINE):
        owners.setdefault(name[len(PREFIX):].split("-")[0], []).append(name)
    for pid, names in owners.items():
        if not os.path.exists(f"/proc/{pid}"):
            _remove(names, f"bg{pid}")


def _environment(hosts, rank, size):
    """The variables of a rank that differ from those set by its launcher, which knows only one host."""
    per_host = hosts["per_host"]
    return {
        "HOROVOD_LOCAL_RANK": str(rank % per_host), "HOROVOD_LOCAL_SIZE": str(per_host),
        "HOROVOD_CROSS_RANK": str(rank // per_host), "HOROVOD_CROSS_SIZE": str(size // per_host),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": hosts["address"], "HOROVOD_GLOO_RENDEZVOUS_PORT": str(hosts["port"]),
        "_HOROVOD_SECRET_KEY": hosts["secret"],
        "HOROVOD_GLOO_IFACE": "eth0", "GLOO_SOCKET_IFNAME": "eth0",
    }


def variables_of(job, rank, size):
    """One rank's variables. job: from Hosts.job()."""
    return {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size),
            **_environment(json.loads(job[VARIABLE]), rank, size)}


def mpi_environment(hosts):
    """Makes MPICH treat ranks of different namespaces as different hosts, and use their links."""
    return {
        "MPIR_CVAR_NUM_CLIQUES": str(hosts.count), "MPIR_CVAR_CLIQUES_BY_BLOCK": "1",
        "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0", "UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0",
    }


def main(command):
    """Does not return."""
    hosts = json.loads(os.environ[VARIABLE])
    size = hosts["per_host"] * len(hosts["names"])
    rank = get_env_rank_and_size()[0]
    os.environ.update(_environment(hosts, rank, size))
    os.execvp("ip", ["ip", "netns", "exec", hosts["names"][rank // hosts["per_host"]], *command])


if __name__ == "__main__":
    main(sys.argv[1:])
