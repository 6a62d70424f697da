"""The driver's connections to its workers. Messages are those of job/elastic_worker.py."""
import asyncio

from bagua_hvd.job import channel
from bagua_hvd.job.server import HANDSHAKE_SECONDS, Server


def _event(message):
    """(event, message) for the driver; (None, None): none that it knows. ValueError: malformed."""
    kind = message.get("type")
    if kind == "join":
        if (type(message.get("skip_sync")) is not bool or not isinstance(message.get("failure"), str | None)
                or type(message.get("silent")) not in (int, type(None))):
            raise ValueError("malformed join")
        return "joined", message
    return (kind, message) if kind == "synced" else (None, None)


class Service(Server):
    """See Server.

    Args:
        secret: bytes. on_event: function of (event, number of the worker, message), called in the service's thread;
            event: "disconnected", or what `event_of` says.
        host: numeric address to bind.
        event_of: function of a message that returns (event, message), with event None where there is none for the
            driver. ValueError: malformed. The default knows "joined" and "synced".
    Raises:
        OSError: the address cannot be used.
    Attributes:
        port.
    """

    def __init__(self, secret, on_event, host="127.0.0.1", event_of=_event):
        self._on_event = on_event
        self._event_of = event_of
        self._writers = {}          # number of the worker -> StreamWriter
        super().__init__(secret, host, "elastic service")

    def send(self, number, message):
        """Sends a message to a worker; lost when it has hung up. Any thread."""
        self.loop.call_soon_threadsafe(self._send, number, channel.encode(message))

    def _send(self, number, data):
        writer = self._writers.get(number)
        if writer is not None:
            writer.write(data)

    async def talk(self, reader, writer):
        """Passes on what a worker says. One that is there already is hung up on."""
        hello = channel.decode(await asyncio.wait_for(reader.readline(), HANDSHAKE_SECONDS))
        number = hello.get("worker")
        if hello.get("type") != "hello" or not isinstance(number, int):
            raise ValueError("a worker begins with hello")
        if number in self._writers:
            return
        self._writers[number] = writer
        try:
            while line := await reader.readline():
                event, message = self._event_of(channel.decode(line))
                if event is not None:
                    self._on_event(event, number, message)
        finally:
            del self._writers[number]
            self._on_event("disconnected", number, None)
