"""A worker's side of an elastic job: at every init(), the driver sends its rank and the address of the rendezvous.

    worker to driver     hello (worker, again), then join (skip_sync, failure, silent) at every init(), syncing
                         before and synced after every State.sync()
                         ping: it lives, though it does not join
    driver to worker     assignment (environment, scope, skip_sync, joins), removed, or refused (reason): the response
                         to join. When the job has failed, refused is sent at once, and is the response to the next join
                         hosts_updated (timestamp, result of HostUpdateResult), or ping, which the worker returns: at
                         any time

A daemon thread receives and passes the response on to init(). A process has one connection, made by the first init()
and kept until the process ends. If it breaks after the driver has sent something, it is made anew.
"""
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace

from bagua_hvd.core import variables
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.log import logger
from bagua_hvd.job import channel
from bagua_hvd.job.channel import Hello
from bagua_hvd.job.environment import PLACE
from bagua_hvd.job.server import split_address

DRIVER, WORKER = "BAGUA_HVD_ELASTIC_DRIVER", "BAGUA_HVD_ELASTIC_WORKER"
_CONNECT_SECONDS = 30
# How often a member tries to reconnect, once a second.
_CONNECTIONS_MAX = 30
_ASSIGNED_VARIABLES = (*PLACE, "HOROVOD_GLOO_IFACE")


class HostUpdateResult:
    """Changes of the hosts: flags, so that two updates are combined by `|`."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class RemovedFromJob(SystemExit):
    """Raised by init() in a worker that has no slot any more. Ends the process with 0, unless it is caught."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True)
class Join:
    """Asks to take part in the next rendezvous.

    Attributes:
        skip_sync: whether this worker's state is intact and needs no synchronization.
        failure: why the previous rendezvous failed to connect; None: it did not.
        silent: the silent rank because of which this worker left the job; None: none.
    """

    skip_sync: bool
    failure: str | None
    silent: int | None


@dataclass(frozen=True)
class Syncing:
    """This worker is about to receive the job's state."""


@dataclass(frozen=True)
class Synced:
    """This worker has the job's state."""


@dataclass(frozen=True)
class Ping:
    """From the driver: does this worker live? From the worker: it does."""


WORKER_SAYS = (Join, Syncing, Synced, Ping)


@dataclass(frozen=True)
class Assignment:
    """This process's rank and size in the next generation of the job.

    Attributes:
        environment: the HOROVOD_ variables of rank, size and interface. scope: names the rendezvous.
        skip_sync: whether all members agree not to synchronize their state after this rendezvous.
        joins: other members have the job's state, and this process does not.
    """

    environment: dict[str, str]
    scope: str
    skip_sync: bool
    joins: bool

    def __post_init__(self):
        if not set(_ASSIGNED_VARIABLES) <= self.environment.keys():
            raise ValueError(f"assignment with the variables {sorted(self.environment)}: "
                             f"expected {', '.join(_ASSIGNED_VARIABLES)}")


@dataclass(frozen=True)
class Removed:
    """This worker has no slot any more."""


@dataclass(frozen=True)
class Refused:
    """There is no next rendezvous. reason: a sentence."""

    reason: str


@dataclass(frozen=True)
class HostsUpdated:
    """result: flags of HostUpdateResult."""

    timestamp: int
    result: int


_DRIVER_SAYS = (Assignment, Removed, Refused, HostsUpdated, Ping)


class DriverLink:
    """A worker's connection to the driver.

    Args:
        worker: this process's number. on_hosts_updated: the receiving thread calls it with (timestamp, result).
    Raises:
        ValueError: the driver does not respond, or does not accept the job's secret.
    """

    def __init__(self, address: str, secret: bytes, worker: int | str,
                 on_hosts_updated: Callable[[int, int], object]) -> None:
        self._address = split_address(address)
        self._secret = secret
        self._worker = int(worker)
        self._pending: Join | Syncing | Synced | None = None     # the last message since the driver's last response
        self._responses: queue.SimpleQueue[Assignment | Removed | Refused] = queue.SimpleQueue()
        self._refused: Refused | None = None
        self._on_hosts_updated = on_hosts_updated
        self._sending = threading.Lock()
        try:
            self._connect()
        except OSError as error:
            raise ValueError(
                f"Horovod initialization failed. The driver of the elastic job does not answer at {address}: {error}"
            ) from None
        threading.Thread(target=self._receive, name="elastic worker", daemon=True).start()

    def _connect(self, again=False):
        connection = channel.Connection(*self._address, self._secret, _CONNECT_SECONDS)
        connection.send(Hello(self._worker, again))
        self._connection = connection

    def _receive(self):
        left = 0            # attempts to reconnect; 0 until the driver has sent something to this worker
        while True:
            message = self._connection.receive(*_DRIVER_SAYS)
            if message is None:
                if not left:
                    break
                left -= 1
                with suppress(OSError):     # the next receive() returns None, too
                    self._connect(again=True)
                    if self._pending:       # the driver may have missed it
                        self._send(self._pending)
                    self._send(Ping())      # and its own
                time.sleep(1)
                continue
            left = _CONNECTIONS_MAX
            if isinstance(message, HostsUpdated):
                self._on_hosts_updated(message.timestamp, message.result)
            elif isinstance(message, Ping):
                self._send(message)
            else:
                self._pending = None
                self._responses.put(message)
        self._responses.put(Refused("The driver of the elastic job has closed the connection."))

    def join(self, skip_sync: bool = False, failure: str | None = None, silent: int | None = None) -> Assignment:
        """Asks to take part in the next rendezvous, and blocks until the driver responds.

        Raises:
            RemovedFromJob: there is no slot for this process any more. ValueError: the job is ending.
        """
        self.send_to_driver(Join(skip_sync, failure, silent))
        response = self._refused or self._responses.get()
        if isinstance(response, Assignment):
            return replace(response, environment={name: response.environment[name] for name in _ASSIGNED_VARIABLES})
        if isinstance(response, Removed):
            where = variables.read("HOROVOD_HOSTNAME") or "this host"
            logger.warning("this process has been removed from elastic job: %s has no slot for it any more", where)
            raise RemovedFromJob
        self._refused = response        # for every later join() as well: the driver may send nothing more
        raise ValueError(f"Horovod initialization failed. {response.reason}")

    def send_to_driver(self, message: Join | Syncing | Synced) -> None:
        """Sends the driver a message."""
        self._pending = message
        self._send(message)

    def _send(self, message):
        with self._sending, suppress(OSError):      # the receiving thread reconnects, or says why it cannot
            self._connection.send(message)


# What this process knows of its elastic job. link: None before init() and in jobs that are not elastic. assignment: of
# the present generation. may_skip_sync, silent: for the next DriverLink.join().
worker = SimpleNamespace(link=None, assignment=None, may_skip_sync=False, silent=None,
                         on_hosts_updated=lambda timestamp, result: None)


def connect() -> DriverLink | None:
    """The DriverLink of this process, created if there is none; None: the job is not elastic."""
    address = variables.read(DRIVER)
    if worker.link is None and address:
        worker.link = DriverLink(address, variables.read("_HOROVOD_SECRET_KEY"), variables.read(WORKER),
                                 lambda *update: worker.on_hosts_updated(*update))
    return worker.link


def join_generation(link: DriverLink, failure: str | None = None) -> Assignment:
    """Joins the next rendezvous and puts the assigned rank into this process's environment. See DriverLink.join."""
    worker.assignment = assignment = link.join(worker.may_skip_sync, failure, worker.silent)
    worker.may_skip_sync, worker.silent = False, None
    os.environ.update(assignment.environment)
    return assignment


def failed(error: HorovodInternalError) -> None:
    """Notes that the job failed with a HorovodInternalError: the next join tells the driver which rank was silent.

    The driver notices by itself when a rank has ended.
    """
    worker.silent = error.rank if error.cause == "silent" else None


def send_to_driver(message: Syncing | Synced) -> None:
    """Sends the driver, if there is one, Syncing or Synced."""
    if worker.link is not None:
        worker.link.send_to_driver(message)
