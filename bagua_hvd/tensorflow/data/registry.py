"""The registry of a compute service: its processes learn the dispatchers' addresses, and when the service ends."""
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bagua_hvd.job.channel import Hello
from bagua_hvd.job.probe import connect
from bagua_hvd.job.server import Service

_POLL_SECONDS = 0.1
_CONNECT_SECONDS = 3


@dataclass(frozen=True)
class Dispatcher:
    """Registers the sender as dispatcher `index`. address: `host:port`."""

    index: int
    address: str


@dataclass(frozen=True)
class Wanted:
    """Asks for the address of a dispatcher."""

    index: int


@dataclass(frozen=True)
class Address:
    """The response to Wanted; None: not registered yet."""

    address: str | None


@dataclass(frozen=True)
class Attach:
    """The sender uses the service until it disconnects."""


@dataclass(frozen=True)
class Watch:
    """Requests a Shutdown message when the service ends."""


@dataclass(frozen=True)
class Finished:
    """The service ends when no client is attached any more."""


@dataclass(frozen=True)
class Shutdown:
    """The service ends."""


class Registry(Service):
    """See Service.

    Args:
        secret: bytes that every client must prove that it knows. host: numeric address to bind.
    """

    def __init__(self, secret: Any, host: Any = "127.0.0.1") -> None:
        self._addresses: dict[int, Any] = {}        # index -> address
        self._attached: set[int] = set()      # numbers of clients
        self._watching: set[Any] = set()
        self._finished = False
        self._over = threading.Event()
        super().__init__(secret, self._take, (Dispatcher, Wanted, Attach, Watch, Finished, Shutdown), host)

    def _take(self, event, number, message):
        if event == "dispatcher":
            self._addresses[message.index] = message.address
        elif event == "wanted":
            self.send(number, Address(self._addresses.get(message.index)))
        elif event == "attach":
            self._attached.add(number)
        elif event == "watch":
            self._watching.add(number)
        elif event == "finished":
            self._finished = True
        elif event == "disconnected":
            self._attached.discard(number)
            self._watching.discard(number)
        if event == "shutdown" or (self._finished and not self._attached):
            self._over.set()
        if self._over.is_set():
            while self._watching:
                self.send(self._watching.pop(), Shutdown())


class Client:
    """A connection to a Registry; a context manager.

    Args:
        addresses: [host, port] pairs, tried for up to `timeout` seconds.
    Raises:
        TimeoutError: the registry did not answer.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], secret: bytes, timeout: float) -> None:
        self._timeout = timeout
        self._connection = _connect(addresses, secret, timeout)

    @property
    def local_host(self) -> str:
        """The address by which the registry sees this process."""
        return self._connection.local_host

    def send(self, message: Any) -> None:
        """Sends one of the messages above. OSError: the registry has ended."""
        self._connection.send(message)

    def address_of(self, dispatcher: int) -> str:
        """`host:port` of a dispatcher. TimeoutError: it did not register in time. OSError: the registry has ended."""
        deadline = time.monotonic() + self._timeout
        while True:
            self.send(Wanted(dispatcher))
            response = self._connection.receive(Address)
            if response is None:
                raise ConnectionError("the compute service has ended")
            if response.address is not None:
                return response.address
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"dispatcher {dispatcher} of the compute service did not start within {self._timeout} seconds"
                )
            time.sleep(_POLL_SECONDS)

    def shutdown(self) -> None:
        """Ends the service: its compute tasks return. Call it on one training rank, when all have read their data.

        OSError: the service has ended already.
        """
        self.send(Shutdown())

    def wait_for_shutdown(self) -> None:
        """Blocks until the service ends, or its registry has gone."""
        try:
            self.send(Watch())
        except OSError:
            return
        self._connection.receive(Shutdown)

    def close(self) -> None:
        """Disconnects."""
        self._connection.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def _connect(addresses, secret, timeout):
    deadline = time.monotonic() + timeout
    while True:
        try:
            connection = connect(addresses, secret, _CONNECT_SECONDS)
            connection.send(Hello(secrets.randbits(62)))
            return connection
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the compute service does not answer at {addresses} ({error})") from None
        time.sleep(_POLL_SECONDS)
