"""The hosts that an elastic job may use: the source of the list, its order, and the blacklist."""
import errno
import math
import os
import random
import secrets
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from bagua_hvd.runner.common.util.hosts import HostInfo
from bagua_hvd.runner.processes import MARK, Guard, kill_sessions

_DISCOVERY_SECONDS = 1
_GIVE_UP_SECONDS = 1


class HostDiscovery:
    """The source of the list of hosts. Subclass it for a cluster of your own."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The hosts available now, as {name: slots}. Any exception means that they are not known this time."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends a running search; another job may begin the next one. Callable from any thread."""


class FixedHosts(HostDiscovery):
    """A list, {name: slots}, that changes only through set()."""

    def __init__(self, hosts: dict[str, int]) -> None:
        self.set(hosts)

    def set(self, hosts: dict[str, int]) -> None:
        """Replaces the list."""
        self._hosts = dict(hosts)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._hosts)


class HostDiscoveryScript(HostDiscovery):
    """Runs an executable that prints one host per line, `name:slots` or `name`; no output means no hosts.

    Args:
        discovery_script: path of the executable, or a command with arguments; the shell runs those, and files that do
            not begin with `#!`.
        slots: slots for lines without a number; None: such lines are errors.
    Attributes:
        limit_seconds: a script that runs longer is killed, and its result is an error.
    """

    limit_seconds = 60

    def __init__(self, discovery_script: str, slots: int | None = None) -> None:
        self._script = discovery_script
        self._slots = slots
        self._lock = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._mark = secrets.token_hex(16)
        self._unguard: weakref.finalize[[], HostDiscoveryScript] | None = None

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """See the base class. RuntimeError: the script cannot be run, fails, or prints something else."""
        try:
            with self._lock:
                self._popen = self._start()
            try:
                stdout, stderr = self._popen.communicate(timeout=self.limit_seconds)
            except subprocess.TimeoutExpired:
                self._end()
                raise RuntimeError(f"host discovery script {self._script!r} " + (
                    f"has not ended after {self.limit_seconds} s, and was killed: see what it waits for"
                    if self._popen.returncode == -signal.SIGKILL else
                    f"has ended, but what it started held its output open for {self.limit_seconds} s, and was killed: "
                    "end it in the script, or redirect its output")) from None
            finally:
                self._end()
        except OSError as error:
            remedy = f"; run `chmod +x {self._script}`" if isinstance(error, PermissionError) else ""
            raise RuntimeError(f"host discovery script {self._script!r} cannot be run: {error.strerror}"
                               + remedy) from None
        code = self._popen.returncode
        if code != 0:
            said = stderr.decode(errors="replace").strip()
            raise RuntimeError(f"host discovery script {self._script!r} ended with exit code {code}"
                               + (f": {said}" if said else ""))
        return dict(self._host(line.strip()) for line in stdout.decode(errors="replace").splitlines() if line.strip())

    def _start(self):
        if self._unguard is None:       # a killed launcher must leave no script behind
            self._unguard = weakref.finalize(self, Guard(self._mark).close)

        def start(*command):
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                    start_new_session=True, env={**os.environ, MARK: self._mark})

        try:
            return start(self._script)
        except FileNotFoundError:
            if len(self._script.split()) == 1 or os.path.exists(self._script):
                raise
            return start("/bin/sh", "-c", self._script)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
        return start("/bin/sh", self._script)

    def _host(self, line):
        has_slots = ":" in line.rpartition("]")[2]
        if not has_slots and self._slots is None:
            raise RuntimeError(f"host discovery script {self._script!r} printed {line!r} without a number of slots: "
                               "print name:slots, or give --slots-per-host")
        try:
            info = HostInfo.from_string(line if has_slots else f"{line}:{self._slots}")
        except ValueError as error:
            raise RuntimeError(f"host discovery script {self._script!r}: {error}") from None
        return info.hostname, info.slots

    def close(self) -> None:
        self._end()
        with self._lock:
            if self._unguard is not None:
                self._unguard()
                self._unguard = None

    def _end(self):
        """Kills a script whose output has not ended, because it hangs or Ctrl-C was pressed, and its children."""
        with self._lock:
            # Not poll(): processes that hold the output open may outlive the script. Its pid is ours until we reap it.
            if self._popen is not None and self._popen.returncode is None:
                kill_sessions({self._popen.pid})
                self._popen.wait()


@contextmanager
def searched(discovery: HostDiscovery, on_found: Callable[[dict[str, int]], object],
             say: Callable[[str], object]) -> Iterator[threading.Thread]:
    """Queries a HostDiscovery every second, in a thread of its own, which it yields. on_found: gets {name: slots}."""
    ended = threading.Event()

    def search():
        said = None
        while not ended.wait(_DISCOVERY_SECONDS):
            try:
                found = discovery.find_available_hosts_and_slots()
            except Exception as error:
                if not ended.is_set() and str(error) != said:
                    say(f"baguarun: keeping the current hosts: {error}")
                    said = str(error)
            else:
                said = None
                on_found(found)

    thread = threading.Thread(target=search, name="elastic discovery", daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        ended.set()
        for _ in range(2):
            discovery.close()
            thread.join(_GIVE_UP_SECONDS)           # a user's own discovery may hang, and have no close()
            if not thread.is_alive():
                break           # else a last search has begun after the first close()


class HostManager:
    """The hosts usable now; known hosts keep their order, and new ones come last.

    For use by one thread.

    Args:
        cooldown_range: (low, high) seconds after which a blacklisted host is usable again: blacklist(). None: never.
        clock: seconds. jitter: function of (low, high).
    Attributes:
        come_back: whether blacklisted hosts become usable again.
    """

    def __init__(self, discovery: HostDiscovery, cooldown_range: Sequence[float] | None = None,
                 clock: Callable[[], float] = time.monotonic,
                 jitter: Callable[[float, float], float] = random.uniform) -> None:
        self.discovery = discovery
        self.come_back = cooldown_range is not None
        self._range = cooldown_range
        self._clock = clock
        self._jitter = jitter
        self._failures: dict[str, int] = {}
        self._until: dict[str, float] = {}      # blacklisted hosts: until when
        self._found: dict[str, int] = {}
        self._order: list[str] = []

    def take(self, found: dict[str, int]) -> None:
        """Adopts the result of a discovery, {name: slots}."""
        self._found = dict(found)

    @property
    def current_hosts(self) -> dict[str, int]:
        """{name: slots} of the usable hosts, in their order."""
        now = self._clock()
        usable = [host for host in self._found if now >= self._until.get(host, -math.inf)]
        self._order = [host for host in self._order if host in usable]
        self._order += [host for host in usable if host not in self._order]
        return {host: self._found[host] for host in self._order}

    def blacklist(self, host: str) -> None:
        """Called when a worker failed on a host: it is unused until its cooldown is over, and then counts as new.

        The cooldown takes, after the host's n-th failure, low * 2^(n-1) seconds and up to `low` more, at most `high`.
        """
        failures = self._failures[host] = self._failures.get(host, 0) + 1
        if self._range is None:
            self._until[host] = math.inf
            return
        low, high = self._range
        # 2^12 always exceeds the range.
        delay = low * 2 ** min(failures - 1, 12) + self._jitter(0, low)
        self._until[host] = self._clock() + min(max(delay, low), high)

    @property
    def all_lost(self) -> bool:
        """Whether every host of the last discovery is blacklisted forever."""
        return not self.come_back and bool(self._found) and not self.current_hosts
