"""Hosts for ssh: a real sshd on this machine, with keys and configuration in the test's own folder.

`SshHosts` serves any number of names through loopback. `Namespaces` makes hosts that share no network, host name or
memory, joined by a bridge, with an sshd in each: network namespaces, which need root. Processes hold the namespaces, so
they disappear with the test.
"""
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_hvd.job.server import join_address
from launcher import wait_until
from ports import free_port

_SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
_PR_SET_PDEATHSIG = 1
_PRIVILEGE_SEPARATION = Path("/run/sshd")       # sshd does not start without it
_PORT_TRIALS = 5


def _dies_with_us():
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def require_sshd():
    """Skips the test if OpenSSH is missing."""
    if not (_SSHD and shutil.which("ssh") and shutil.which("ssh-keygen")):
        pytest.skip("needs OpenSSH: sshd, ssh, ssh-keygen")
    if os.geteuid() != 0 and not _PRIVILEGE_SEPARATION.exists():
        pytest.skip(f"sshd needs the folder {_PRIVILEGE_SEPARATION}, which only root can make")


class _Sshd:
    """An sshd that accepts this user with the folder's key.

    Attributes:
        port. temporary: the folder for temporary files of all its processes.
    """

    def __init__(self, folder, address, port, prefix=()):
        self.port = port
        self.temporary = folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        config = folder / f"sshd_config.{address}.{port}"
        config.write_text("\n".join([
            f"ListenAddress {join_address(address, port)}", f"HostKey {folder}/host_key",
            f"AuthorizedKeysFile {folder}/key.pub",
            "StrictModes no", "UsePAM no", "PasswordAuthentication no", "PermitRootLogin yes", "PidFile none",
            "MaxStartups 100", f"SetEnv TMPDIR={self.temporary}", ""]))
        _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        self._log = open(folder / f"sshd.{address}.{port}.log", "wb")
        self.popen = subprocess.Popen([*prefix, _SSHD, "-D", "-e", "-f", str(config)], preexec_fn=_dies_with_us,
                                      stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)

    def log(self):
        """Its log."""
        return Path(self._log.name).read_text(errors="replace")

    def listens(self):
        """True once it listens; False: it has ended."""
        wait_until(lambda: "Server listening" in self.log() or self.popen.poll() is not None)
        return self.popen.poll() is None

    def sessions(self):
        """Pids of the processes that serve connections."""
        if self.popen.poll() is not None:
            return []
        return [int(pid) for pid in Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()]

    def close(self):
        for pid in self.sessions():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.popen.kill()
        self.popen.wait()
        self._log.close()


def _make_keys(folder):
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)


class SshHosts:
    """Hosts far1, far2, ...: names that only ssh can resolve, all for this machine.

    Attributes:
        environment: variables that configure baguarun's ssh for them.
        port, key: for jobs without these variables.
    """

    def __init__(self, folder):
        require_sshd()
        _make_keys(folder)
        self.key = folder / "key"
        for _ in range(_PORT_TRIALS):       # two tests may choose the same
            self.server = _Sshd(folder, "127.0.0.1", free_port())
            if self.server.listens():
                break
            self.server.close()
        else:
            raise AssertionError(self.server.log())
        self.port = self.server.port
        config = folder / "ssh_config"
        config.write_text(f"Host far*\n  HostName 127.0.0.1\n  Port {self.port}\n  IdentityFile {folder}/key\n"
                          f"Host *\n  UserKnownHostsFile {folder}/known_hosts\n  IdentitiesOnly yes\n")
        self.environment = {"BAGUA_HVD_SSH_COMMAND": f"ssh -F {config}"}

    def left(self):
        """Pids of the processes started through this sshd: agents, ranks, and all their children."""
        found, mark = [], f" 127.0.0.1 {self.port}\0".encode()
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if mark in Path(f"/proc/{name}/environ").read_bytes() + b"\0":
                    found.append(int(name))
            except OSError:
                pass
        return found

    def close(self):
        for pid in self.left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.server.close()


class Namespaces:
    """Hosts h0, h1, ... with the addresses 10.0.0.1, 10.0.0.2, ... on eth0, each with an sshd.

    Args:
        families: "4", "6" (fd00::1, fd00::2, ...) or "46" (both) for each host; None: IPv4.
    Attributes:
        environment: as for SshHosts.
        rsh: a program that replaces ssh.
    """

    def __init__(self, folder, count, families=None):
        require_sshd()
        if os.geteuid() != 0 or not all(shutil.which(name) for name in ("ip", "nsenter", "unshare")):
            pytest.skip("needs root, and ip, nsenter and unshare: hosts are network namespaces")
        _make_keys(folder)
        self._servers, self._holders, self._networks, self._carrier = [], [], 0, None
        try:
            self._make(folder, families or ["4"] * count)
        except BaseException:
            self.close()
            raise

    def _make(self, folder, families):
        switch = self._hold("switch")
        self._run(switch, "ip link add bridge type bridge", "ip link set bridge up")
        config = ["Host *", f"  IdentityFile {folder}/key", f"  UserKnownHostsFile {folder}/known_hosts",
                  "  IdentitiesOnly yes", "  Port 2222"]
        for i, digits in enumerate(families):
            by_family = {"4": f"10.0.0.{i + 1}", "6": f"fd00::{i + 1}"}
            reached_at = by_family[digits[-1]]
            holder = self._hold(f"h{i}")
            self._run(switch, f"ip link add port{i} type veth peer name eth0 netns {holder}",
                      f"ip link set port{i} master bridge up")
            self._run(holder, "ip link set lo up", "ip link set eth0 up", "mount -t tmpfs tmpfs /dev/shm", *(
                f"ip address add {by_family[digit]}/{24 if digit == '4' else '64 nodad'} dev eth0" for digit in digits))
            self._servers.append(_Sshd(folder, reached_at, 2222, self.enter(i)))
            config += [f"Host h{i}", f"  HostName {reached_at}"]
        (folder / "ssh_config").write_text("\n".join(config) + "\n")
        self.environment = {"BAGUA_HVD_SSH_COMMAND": f"ssh -F {folder}/ssh_config"}
        self.rsh = folder / "rsh"
        self.rsh.write_text(f'#!/bin/sh\nexec ssh -o StrictHostKeyChecking=accept-new -F {folder}/ssh_config "$@"\n')
        self.rsh.chmod(0o755)
        for server in self._servers:
            assert server.listens(), server.log()

    def _hold(self, name):
        """The pid of a process that holds new namespaces."""
        code = "import socket, sys, time; socket.sethostname(sys.argv[1]); print(flush=True); time.sleep(1e6)"
        popen = subprocess.Popen(
            ["unshare", "--net", "--uts", "--ipc", "--mount", sys.executable, "-I", "-S", "-c", code, name],
            preexec_fn=_dies_with_us, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._holders.append(popen)
        if not popen.stdout.readline():
            pytest.skip(f"no namespaces here: {popen.stderr.read().decode(errors='replace').strip()}")
        return popen.pid

    @staticmethod
    def _run(holder, *commands):
        for command in commands:
            subprocess.run([*_entering(holder), *command.split()], check=True)

    def enter(self, i):
        """The command prefix to run on host i."""
        return _entering(self._holders[i + 1].pid)

    def network(self, interface, hosts):
        """Connects some hosts by another network, 10.0.N.0/24, on its own bridge."""
        self._networks += 1
        switch, prefix = self._holders[0].pid, f"10.0.{self._networks}"
        self._run(switch, f"ip link add {interface} type bridge", f"ip link set {interface} up")
        for i in hosts:
            self._run(switch, f"ip link add {interface}{i} type veth peer name {interface} netns "
                      f"{self._holders[i + 1].pid}", f"ip link set {interface}{i} master {interface} up")
            self._run(self._holders[i + 1].pid, f"ip address add {prefix}.{i + 1}/24 dev {interface}",
                      f"ip link set {interface} up")

    def limit(self, rate):
        """Limits every host to this rate on eth0, such as 100mbit, in each direction."""
        for i, holder in enumerate(self._holders[1:]):
            for pid, interface in ((self._holders[0].pid, f"port{i}"), (holder.pid, "eth0")):
                self._run(pid, f"tc qdisc replace dev {interface} root tbf rate {rate} burst 256kb latency 50ms")

    def delay(self, milliseconds, rate="none"):
        """Sets the one-way delay between any two hosts; rate: as for limit(), or "none".

        Must be called once, before anything runs.
        """
        from tests.laboratory.hosts import CARRIED
        from tests.laboratory.network import Carrier, Link

        holders = self._holders[1:]
        self._carrier = Carrier([(f"/proc/{holder.pid}/ns/net", "far0") for holder in holders])
        for i, holder in enumerate(holders):
            self._run(holder.pid, "ip link delete eth0", "ip link set far0 name eth0",
                      f"ip address add 10.0.0.{i + 1}/24 dev eth0", "ip link set eth0 txqueuelen 10000 up")
            for variable, value in CARRIED.items():
                subprocess.run([*_entering(holder.pid), "sysctl", "-qw", f"net.ipv4.{variable}={value}"], check=True)
            self._carrier.set(i, Link(rate, rate, milliseconds))

    def received(self, i, interface):
        """Bytes that host i has received on an interface."""
        path = f"/sys/class/net/{interface}/statistics/rx_bytes"
        code = f"mount -t sysfs none /sys; cat {path}"
        return int(subprocess.run([*self.enter(i), "unshare", "--mount", "sh", "-c", code], check=True,
                                  capture_output=True, text=True).stdout)

    def cut(self, i):
        """Stops all traffic of host i, without an error at any end."""
        self._run(self._holders[0].pid, f"ip link set port{i} down")

    def mend(self, i):
        """Undoes cut()."""
        self._run(self._holders[0].pid, f"ip link set port{i} up")

    def separate(self, i, j, silently=False):
        """Disconnects hosts i and j. silently: packets are dropped instead of rejected."""
        for one, other in ((i, j), (j, i)):
            self._run(self._holders[one + 1].pid,
                      f"ip neighbor replace 10.0.0.{other + 1} lladdr 02:00:00:00:00:99 dev eth0 nud permanent"
                      if silently else f"ip route add unreachable 10.0.0.{other + 1}/32")

    def rejoin(self, i, j, silently=False):
        """Undoes separate()."""
        for one, other in ((i, j), (j, i)):
            self._run(self._holders[one + 1].pid, f"ip neighbor del 10.0.0.{other + 1} dev eth0"
                      if silently else f"ip route del unreachable 10.0.0.{other + 1}/32")

    def open_only(self, first, last):
        """Makes all hosts reject connections to ports other than these and sshd's."""
        if not shutil.which("iptables"):
            pytest.skip("iptables is not installed")
        for holder in self._holders[1:]:
            self._run(holder.pid, *(f"iptables -A INPUT -i eth0 -p tcp --syn {rule}" for rule in (
                "--dport 2222 -j ACCEPT", f"--dport {first}:{last} -j ACCEPT", "-j REJECT --reject-with tcp-reset")))

    def close(self):
        if self._carrier:
            self._carrier.close()
        for server in self._servers:
            server.close()
        for holder in self._holders:
            holder.kill()
            holder.wait()
            holder.stdout.close()
            holder.stderr.close()


def _entering(pid):
    return ["nsenter", "-t", str(pid), "--net", "--uts", "--ipc", "--mount", "--wd=."]
