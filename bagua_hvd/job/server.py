"""Servers for processes that know the job's secret: asyncio in a thread of its own; and their addresses.

An unauthenticated peer may send 72 bytes of handshake within a few seconds; none of them is interpreted before the
proof. With _UNAUTHENTICATED_MAX such peers connected, a further one replaces a random one. See job/channel.py.

The core's ranks listen in native/transport.
"""
import asyncio
import errno
import random
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.job import channel
from bagua_hvd.job.channel import Hello, name_of

HANDSHAKE_SECONDS = 10
_UNAUTHENTICATED_MAX = 256
EVERY_INTERFACE = "::"      # for listen() and Rendezvous: IPv4 included


def join_address(host: str, port: int | str) -> str:
    """`10.0.0.1:29400`, `[fd00::1]:29400`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of an address made by join_address(). ValueError: malformed."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listen(host: str, ports: Sequence[int] | None = None) -> socket.socket:
    """A socket that listens on the first free port of `ports`.

    Args:
        host: a numeric address, or EVERY_INTERFACE.
        ports: None: those of BAGUA_HVD_PORTS.
    Raises:
        OSError: no port is free, or the address is not this host's; the message names both.
    """
    if host == EVERY_INTERFACE and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    by_6 = ":" in host
    ports = variables.read("BAGUA_HVD_PORTS") if ports is None else ports
    for port in ports:
        try:
            return socket.create_server((host, port), family=socket.AF_INET6 if by_6 else socket.AF_INET, backlog=256,
                                        dualstack_ipv6=by_6)
        except OSError as error:
            failure = error
    where, why = join_address(host, port), failure.strerror
    if failure.errno == errno.EADDRINUSE and port > 0:      # the wording of native/transport/socket.c
        where = join_address(host, min(ports)) + (f"-{max(ports)}" if len(ports) > 1 else "")
        why = "no port of BAGUA_HVD_PORTS is free: widen the range or unset it"
    raise OSError(f"cannot listen on {where}: {why}") from failure


class Server:
    """Listens from construction to close(); a context manager. Subclasses define what follows the handshake: serve().

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
        """Talks to an authenticated process; the connection ends when this returns. Here it does nothing.

        It may raise the errors that the other side can cause: OSError, ValueError, EOFError and TimeoutError.
        """

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


class Service(Server):
    """A launcher's connections to processes that begin with a hello: a driver's workers, a registry's clients.

    Args:
        on_event: function of (event, number of the worker, message), called in the service's thread;
            event: the message's name, or "disconnected".
        kinds: dataclasses of the messages that a worker may send after its hello. Any other message ends the
            connection.
        host: numeric address to bind.
    Raises:
        OSError: the address cannot be used.
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
        said = channel.decode(await asyncio.wait_for(reader.readline(), HANDSHAKE_SECONDS), Hello)
        number, older = said.worker, self._writers.get(said.worker)
        if older is not None:
            if not said.again:
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
