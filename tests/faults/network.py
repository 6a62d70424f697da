"""The links of hosts that are network namespaces, and ways to break them. Needs root and iproute2."""
import subprocess
from dataclasses import dataclass

from tests.laboratory.hosts import Hosts


def _run(*command):
    subprocess.run(command, check=True, capture_output=True)


@dataclass
class HostLink:
    """One host: its namespace, its address, and the bridge end of its link."""

    namespace: str
    address: str
    device: str
    bridge: str
    bridge_address: str

    def down(self):
        """Takes the link down, like a pulled cable."""
        _run("ip", "link", "set", self.device, "down")

    def drop(self):
        """Drops all packets in both directions; the link stays up, so no end gets an error."""
        _run("ip", "link", "set", self.device, "nomaster")

    def drop_to(self, other):
        """Drops the packets to one other host; one direction is enough."""
        _run("ip", "-n", self.namespace, "route", "add", "blackhole", f"{other.address}/32")

    def limit(self, rate):
        """Drops packets beyond this rate."""
        for prefix, device in ((["tc"], self.device), (["tc", "-n", self.namespace], "eth0")):
            _run(*prefix, "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", "4kb",
                 "latency", "50ms")

    def mend(self):
        """Undoes all of the above."""
        _run("ip", "link", "set", self.device, "master", self.bridge, "up")
        for command in (["ip", "-n", self.namespace, "route", "flush", "type", "blackhole"],
                        ["tc", "qdisc", "del", "dev", self.device, "root"],
                        ["tc", "-n", self.namespace, "qdisc", "del", "dev", "eth0", "root"]):
            subprocess.run(command, capture_output=True)        # there may be no rule


class Network(Hosts):
    """`count` hosts; links: HostLinks. A context manager."""

    def __init__(self, count):
        super().__init__(count, "none")
        self.links = [HostLink(name, self.address_of(index), f"{self._bridge}v{index}", self._bridge, self.address)
                      for index, name in enumerate(self.names)]
