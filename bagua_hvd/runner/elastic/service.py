"""The driver's connections to its workers: an asyncio server in a thread of its own.

A stranger may say 72 bytes of handshake, for a few seconds, and nothing of them is interpreted before the proof. When
there are _STRANGERS_MAX, one more takes the place of the one that has waited longest. Messages are those of
common/elastic_worker.py.
"""
import asyncio
import threading

from bagua_hvd.common import channel

_HANDSHAKE_SECONDS = 10
_STRANGERS_MAX = 256


def _event(message):
    """(event, message) for the driver; (None, None): none that it knows. ValueError: malformed."""
    kind = message.get("type")
    if kind == "join":
        if type(message.get("skip_sync")) is not bool or not isinstance(message.get("failure"), str | None):
            raise ValueError("malformed join")
        return "joined", message
    return (kind, message) if kind == "synced" else (None, None)


class Service:
    """Listens from construction to close(); a context manager.

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
        self._secret = secret
        self._on_event = on_event
        self._event_of = event_of
        self._writers = {}          # number of the worker -> StreamWriter
        self._strangers = {}        # their tasks, in the order they came; a dict for its order
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, host, 0, limit=channel.MESSAGE_MAX))
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="elastic service", daemon=True)
        self._thread.start()

    def send(self, number, message):
        """Sends a message to a worker; lost when it has hung up. Any thread."""
        self._loop.call_soon_threadsafe(self._send, number, channel.encode(message))

    def _send(self, number, data):
        writer = self._writers.get(number)
        if writer is not None:
            writer.write(data)

    async def _serve(self, reader, writer):
        number = None
        try:
            number = await self._welcome(reader, writer)
            if number is None:
                return
            while line := await reader.readline():
                event, message = self._event_of(channel.decode(line))
                if event is not None:
                    self._on_event(event, number, message)
        except (OSError, ValueError, EOFError, TimeoutError, asyncio.TimeoutError):
            pass        # a stranger, or a worker that ended: its process says how
        except asyncio.CancelledError:
            pass        # close(), or a newer stranger; passed on, Python 3.11 would print it
        finally:
            if number is not None:
                del self._writers[number]
                self._on_event("disconnected", number, None)
            writer.close()

    async def _welcome(self, reader, writer):
        """The worker's number after its proof and its hello; None: it is there already."""
        if len(self._strangers) >= _STRANGERS_MAX:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        self._strangers[asyncio.current_task()] = None
        try:
            number = await asyncio.wait_for(self._handshake(reader, writer), _HANDSHAKE_SECONDS)
        finally:
            self._strangers.pop(asyncio.current_task(), None)
        if number in self._writers:
            return None
        self._writers[number] = writer
        return number

    async def _handshake(self, reader, writer):
        handshake = channel.Handshake(self._secret, channel.ACCEPTED)
        writer.write(handshake.hello)
        writer.write(handshake.answer(await reader.readexactly(channel.HELLO_SIZE)))
        handshake.check(await reader.readexactly(channel.PROOF_SIZE))
        message = channel.decode(await reader.readline())
        if message.get("type") != "hello" or not isinstance(message.get("worker"), int):
            raise ValueError("a worker begins with hello")
        return message["worker"]

    def close(self):
        """Hangs up on everybody, and ends the thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self):
        self._server.close()
        # Again and again: a handshake may have begun only now, and wait_for() of Python < 3.12 loses a cancellation
        # that comes together with the result.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=0.1)
        # Once around, for their transports to close the sockets.
        await asyncio.sleep(0)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
