"""A launcher's connections to processes that begin with a hello: a driver's workers, a registry's clients."""
import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from bagua_hvd.job import channel
from bagua_hvd.job.messages import Hello, HelloAgain, name_of
from bagua_hvd.job.server import HANDSHAKE_SECONDS, Server


class Service(Server):
    """See Server.

    Args:
        on_event: function of (event, number of the worker, message), called in the service's thread;
            event: the message's name, or "disconnected".
        kinds: dataclasses of the messages that a worker may send after its hello (job/messages.py). Any other message
            ends the connection.
        host: numeric address to bind.
    Raises:
        OSError: the address cannot be used.
    Attributes:
        port.
    """

    def __init__(self, secret: bytes, on_event: Callable[[str, int, Any], object], kinds: Sequence[type],
                 host: str = "127.0.0.1") -> None:
        self._on_event = on_event
        self._kinds = kinds
        self._writers: dict[Any, Any] = {}          # number of the worker -> StreamWriter
        super().__init__(secret, host, "elastic service")

    def send(self, number: int, message: Any) -> None:
        """Sends a message to a worker; it is lost if the worker has disconnected. Any thread."""
        self.loop.call_soon_threadsafe(self._send, number, channel.encode(message))

    def _send(self, number, data):
        writer = self._writers.get(number)
        if writer is not None:
            writer.write(data)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes a worker's messages to on_event.

        If two processes have one number, as a worker and a process it started, the second connection is closed. But if
        a worker says that its connection broke, the older one is closed: this side may not have noticed the break.
        """
        said = channel.decode(await asyncio.wait_for(reader.readline(), HANDSHAKE_SECONDS), Hello, HelloAgain)
        number, older = said.worker, self._writers.get(said.worker)
        if older is not None:
            if isinstance(said, Hello):
                return
            older.transport.abort()
        self._writers[number] = writer
        try:
            while (line := await reader.readline()) and self._writers.get(number) is writer:
                message = channel.decode(line, *self._kinds)
                self._on_event(name_of(type(message)), number, message)
        finally:
            if self._writers.get(number) is writer:
                del self._writers[number]
                self._on_event("disconnected", number, None)
