"""A server for processes that know the job's secret: asyncio in a thread of its own.

An unauthenticated peer may send 72 bytes of handshake within a few seconds; none of them is interpreted before the
proof. With _UNAUTHENTICATED_MAX such peers connected, a further one replaces a random one. See job/channel.py.
"""
import asyncio
import random
import socket
import threading
from collections.abc import Sequence
from typing import Any

from bagua_hvd.job import channel
from bagua_hvd.job.ports import listen

HANDSHAKE_SECONDS = 10
_UNAUTHENTICATED_MAX = 256


class Server:
    """Listens from construction to close(); a context manager. Subclasses define the serve() after the handshake.

    Args:
        host: numeric address to bind. name: of the thread. ports: as for listen().
    Raises:
        OSError: the address cannot be used.
    Attributes:
        port. loop: of the thread.
    """

    def __init__(self, secret: bytes, host: str, name: str, ports: Sequence[int] | None = None) -> None:
        self._secret = secret
        self._unauthenticated: set[Any] = set()     # their tasks
        self.loop = asyncio.new_event_loop()
        listener = listen(host, ports)
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()
        # In that thread: the present one may run an event loop already, as in a notebook.
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, sock=listener, limit=channel.MESSAGE_MAX, backlog=socket.SOMAXCONN),
            self.loop).result()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Talks to an authenticated process; the connection ends when this returns.

        It may raise the errors that the other side can cause: OSError, ValueError, EOFError and TimeoutError.
        """
        raise NotImplementedError

    async def _serve(self, reader, writer):
        try:
            channel.enable_keepalive(writer.get_extra_info("socket"))
            await self._admit(reader, writer)
            await self.serve(reader, writer)
        except (OSError, ValueError, EOFError, TimeoutError, asyncio.TimeoutError):
            pass        # an unauthenticated peer, or a process that ended: the launcher learns how elsewhere
        except asyncio.CancelledError:
            pass        # by close(), or a newer peer; Python 3.11 would print it if it were passed on
        finally:
            writer.close()

    async def _admit(self, reader, writer):
        if len(self._unauthenticated) >= _UNAUTHENTICATED_MAX:
            # In a flood, the oldest one would always be a worker's.
            evicted = random.choice(list(self._unauthenticated))
            self._unauthenticated.discard(evicted)
            evicted.cancel()
        self._unauthenticated.add(asyncio.current_task())
        try:
            await asyncio.wait_for(self._handshake(reader, writer), HANDSHAKE_SECONDS)
        finally:
            self._unauthenticated.discard(asyncio.current_task())

    async def _handshake(self, reader, writer):
        port = writer.get_extra_info("sockname")[1]
        handshake = channel.Handshake(self._secret, channel.ACCEPTED, port)
        writer.write(handshake.hello)
        writer.write(handshake.proof(await reader.readexactly(channel.HELLO_SIZE)))
        handshake.check(await reader.readexactly(channel.PROOF_SIZE))
        writer.write(channel.ADMISSION)

    def close(self) -> None:
        """Closes all connections, and ends the thread. Idempotent."""
        if self.loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _close(self):
        self._server.close()
        # Repeatedly: a handshake may have begun only now, and wait_for() of Python < 3.12 loses a cancellation that
        # coincides with the result.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=0.1)
        # One turn of the loop, in which the transports close their sockets.
        await asyncio.sleep(0)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
