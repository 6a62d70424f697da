"""Where the processes of a compute service find each other: who dispatches, and when all is over.

    client to registry    dispatcher (index, address)   from now on this is dispatcher `index`
                          address (index)               answered by address (address, or null: nobody yet)
                          attach                        whoever says this is using the service until it hangs up
                          watch                         answered by shutdown, when the service ends
                          finished                      end the service when nobody is attached any more
                          shutdown                      end the service
"""
import secrets
import threading
import time

from bagua_hvd.job import channel
from bagua_hvd.job.service import Service

_POLL_SECONDS = 0.1


def _message(message):
    """(kind, message); ValueError: malformed."""
    kind = message.get("type")
    if kind in ("dispatcher", "address") and type(message.get("index")) is not int:
        raise ValueError(f"malformed {kind}")
    if kind == "dispatcher" and type(message.get("address")) is not str:
        raise ValueError("malformed dispatcher")
    return kind, message


class Registry:
    """Listens from construction to close(); a context manager.

    Args:
        secret: bytes that every client must prove to know. host: numeric address to bind.
    Attributes:
        port.
    """

    def __init__(self, secret, host="127.0.0.1"):
        self._addresses = {}        # index -> address
        self._attached = set()      # numbers of clients
        self._watching = set()
        self._finished = False
        self._over = threading.Event()
        self._service = Service(secret, self._on_event, host, _message)
        self.port = self._service.port

    def _on_event(self, event, number, message):
        if event == "dispatcher":
            self._addresses[message["index"]] = message["address"]
        elif event == "address":
            self._service.send(number, {"type": "address", "address": self._addresses.get(message["index"])})
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
                self._service.send(self._watching.pop(), {"type": "shutdown"})

    def close(self):
        """Hangs up on everybody."""
        self._service.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


class Client:
    """A connection to a Registry; a context manager.

    Args:
        addresses: [host, port] pairs, tried in turn until `timeout` seconds are over. secret: bytes.
    Raises:
        TimeoutError: the registry did not answer.
    """

    def __init__(self, addresses, secret, timeout):
        self._timeout = timeout
        self._connection = _connect(addresses, secret, timeout)

    @property
    def local_host(self):
        """The address by which the registry sees this process."""
        return self._connection.local_host

    def send(self, kind, **fields):
        """OSError: the registry has ended."""
        self._connection.send({"type": kind, **fields})

    def address_of(self, dispatcher):
        """`host:port` of a dispatcher. TimeoutError: nobody has said so in time. OSError: the registry has ended."""
        deadline = time.monotonic() + self._timeout
        while True:
            self.send("address", index=dispatcher)
            answer = self._connection.receive()
            if answer is None:
                raise ConnectionError("the compute service has ended")
            if answer["address"] is not None:
                return answer["address"]
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"dispatcher {dispatcher} of the compute service did not start within {self._timeout} seconds"
                )
            time.sleep(_POLL_SECONDS)

    def shutdown(self):
        """Ends the service: its compute tasks return. For one training rank, when all have read what they need.

        OSError: it has ended already.
        """
        self.send("shutdown")

    def wait_for_shutdown(self):
        """Blocks until the service ends, or its registry has gone."""
        try:
            self.send("watch")
        except OSError:
            return
        self._connection.receive()

    def close(self):
        """Hangs up."""
        self._connection.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def _connect(addresses, secret, timeout):
    deadline = time.monotonic() + timeout
    failure = None
    while True:
        for host, port in addresses:
            try:
                connection = channel.Connection(host, port, secret, max(1, deadline - time.monotonic()))
                connection.send({"type": "hello", "worker": secrets.randbits(62)})
                return connection
            except OSError as error:
                failure = error
        if time.monotonic() > deadline:
            raise TimeoutError(f"the compute service does not answer at {addresses} ({failure})")
        time.sleep(_POLL_SECONDS)
