"""The rendezvous of a job's ranks: an allgather of their endpoints, before any rank knows another's address.

The Rendezvous is a server in the launcher, or in rank 0 under other launchers. Each rank registers its endpoint and
waits. When all ranks of a scope have registered, each gets all endpoints, and the scope is forgotten: its name may be
used again. If ranks disagree, if one has ended, or when the first one gives up, every rank of the scope gets the error.
"""
import asyncio
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NoReturn

from bagua_hvd.job import channel
from bagua_hvd.job.server import Server, join_address

_SCOPE_MAX, _ENDPOINT_MAX, _SIZE_MAX = 255, 4096, 16384     # bytes, bytes, ranks
_REQUEST_SECONDS = 5        # from the handshake to the end of the request
_SEND_SECONDS = 30          # without progress in sending the response
_SEND_PIECE = 1 << 16       # bytes of a response, which all ranks share, that one connection copies at a time
_CLOSE_SECONDS = 5          # for responses that are being sent
_NAMED_MAX = 8              # missing ranks
_RETRY_SECONDS = 0.005, 0.5


@dataclass(frozen=True)
class Register:
    """A rank's request. endpoint: in hexadecimal. seconds: after which the server responds even if ranks are missing.
    limit: what the rank's user set, for the message.
    """

    scope: str
    rank: int
    size: int
    endpoint: str
    seconds: float
    limit: float


@dataclass(frozen=True)
class Endpoints:
    """All ranks have registered: `size` bytes for each follow, in the order of ranks."""

    size: int


@dataclass(frozen=True)
class Refused:
    """An error of every rank in the scope. kind: the name of a status of the core, without BHVD_."""

    kind: str
    message: str


class _Scope:
    """The ranks that wait under one name. response: a future of the bytes that all of them get."""

    def __init__(self, name, size):
        self.name = name
        self.size = size
        self.endpoints = {}         # by rank
        self.response = asyncio.get_running_loop().create_future()

    def objection(self, request):
        """Why this rank cannot join; None: it can."""
        where = f"(scope {self.name})"
        if request.size != self.size:
            return (f"rank {request.rank} expects {request.size} ranks in the job, other ranks expect {self.size} "
                    f"{where}")
        if request.rank >= self.size:
            return (f"a process says it is rank {request.rank} of {self.size}; ranks are 0 to {self.size - 1} {where}")
        if request.rank in self.endpoints:
            return (f"two processes say they are rank {request.rank} of {self.size} {where}: if a rank starts a "
                    "process that calls init(), remove HOROVOD_RANK and HOROVOD_SIZE from its environment")
        return None

    def everything(self):
        size = max(map(len, self.endpoints.values()))       # versions differ
        return Endpoints(size), b"".join(self.endpoints[rank].ljust(size, b"\0") for rank in range(self.size))

    def missing(self, limit):
        ranks = [rank for rank in range(self.size) if rank not in self.endpoints]
        named, more = ", ".join(map(str, ranks[:_NAMED_MAX])), len(ranks) - _NAMED_MAX
        return (f"rank{'s' if len(ranks) > 1 else ''} {named}{f' and {more} more' if more > 0 else ''} of {self.size} "
                f"did not arrive within {_duration(limit)} (HOROVOD_START_TIMEOUT; scope {self.name})")


class Rendezvous(Server):
    """Listens from construction to close(); a context manager.

    Attributes:
        host, port: the address for HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT.

    Args:
        secret: bytes that every rank must know.
        host: numeric address to bind, or ports.EVERY_INTERFACE.
        port: None: the first free port of BAGUA_HVD_PORTS.
    Raises:
        RuntimeError: the address is in use, the native extension is not built, or the secret is empty; the message
            says which.
    """

    def __init__(self, secret: bytes, host: str = "127.0.0.1", port: int | None = None) -> None:
        if not secret:
            raise RuntimeError("the job's secret is empty, so anybody could join the job: set _HOROVOD_SECRET_KEY to "
                               "random bytes")
        try:
            from bagua_hvd.core import native as native  # else each rank would report that it is not built
        except ImportError as missing:
            raise RuntimeError(str(missing)) from None
        self.host = host
        self._scopes: dict[str, _Scope] = {}
        self._ended: list[tuple[str, int, int | None]] = []     # (scope, rank, exit code), the first one first
        self._scope_of: dict[Any, _Scope] = {}      # by task of serve()
        try:
            super().__init__(secret, host, "bagua_hvd rendezvous", None if port is None else [port])
        except OSError as error:
            raise RuntimeError(str(error)) from error

    def rank_ended(self, rank: int, exit_code: int | None, scope: str = "") -> None:
        """Tells ranks that wait for this one in init(), now or later, that its process has ended. scope: "": any."""
        self.loop.call_soon_threadsafe(self._on_ended, (scope, rank, exit_code))

    def _on_ended(self, ended):
        self._ended.append(ended)
        for scope in [*self._scopes.values()]:
            self._check_ended(scope)

    def _check_ended(self, scope):
        """Ends the scope if a missing rank has ended. Names the first: the others may have ended because of it."""
        for name, rank, exit_code in self._ended:
            if name in ("", scope.name) and rank < scope.size and rank not in scope.endpoints:
                return self._end(scope, Refused(
                    "ERR_PEER_LOST", f"rank {rank} of {scope.size} has ended, with exit code {exit_code}, and did not "
                    f"call init() (scope {scope.name})"))

    def _end(self, scope, message, content=b""):
        if not scope.response.done():
            del self._scopes[scope.name]
            scope.response.set_result(channel.encode(message) + content)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = channel.decode(await asyncio.wait_for(reader.readline(), _REQUEST_SECONDS), Register)
        endpoint = bytes.fromhex(request.endpoint)
        if not (0 < len(request.scope.encode()) <= _SCOPE_MAX and 0 < request.size <= _SIZE_MAX and request.rank >= 0
                and len(endpoint) <= _ENDPOINT_MAX and request.seconds >= 0):
            raise ValueError("a request out of its bounds")
        if request.scope not in self._scopes:
            self._scopes[request.scope] = _Scope(request.scope, request.size)
        scope = self._scopes[request.scope]
        task: Any = asyncio.current_task()
        self._scope_of[task] = scope
        task.add_done_callback(self._scope_of.pop)
        if objection := scope.objection(request):
            self._end(scope, Refused("ERR_MISMATCH", objection))
        else:
            scope.endpoints[request.rank] = endpoint
            if len(scope.endpoints) == scope.size:
                self._end(scope, *scope.everything())
            self._check_ended(scope)
            await self._wait(scope, request, reader)
        await self._respond(writer, memoryview(scope.response.result()))

    async def _respond(self, writer, response):
        writer.transport.set_write_buffer_limits(0)         # drain() waits until everything is sent
        for start in range(0, len(response), _SEND_PIECE):
            writer.write(response[start:start + _SEND_PIECE])
            await asyncio.wait_for(writer.drain(), _SEND_SECONDS)

    async def _close(self):
        """Sends the responses first: rank 0 closes when it has its own, which may be the error that ends it."""
        responding = [task for task, scope in self._scope_of.items() if scope.response.done()]
        if responding:
            await asyncio.wait(responding, timeout=_CLOSE_SECONDS)
        await super()._close()

    async def _wait(self, scope, request, reader):
        """Until the scope has ended. EOFError, OSError: this rank has hung up, or sent more, and has left the scope."""
        hung_up = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((scope.response, hung_up), timeout=request.seconds,
                               return_when=asyncio.FIRST_COMPLETED)
        finally:
            hung_up.cancel()
        if scope.response.done():
            return
        if hung_up.done():
            del scope.endpoints[request.rank]
            if not scope.endpoints:
                del self._scopes[scope.name]
            hung_up.result()
            raise EOFError
        # The others would wait in vain, and then report this rank as missing.
        self._end(scope, Refused("ERR_TIMEOUT", scope.missing(request.limit)))


def _duration(seconds):
    """30 s, 1.5 s, 0.25 s."""
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def gather_endpoints(options: Any, endpoint: bytes) -> bytes:
    """Sends this rank's endpoint; returns those of all ranks, in order, each as long as this one: cut, or with zeros.

    Retries until the server is up, at most for options.start_timeout_ms.

    Raises:
        ValueError: too many ranks.
        HorovodInternalError: the message names the missing ranks, the disagreement, the rank that has ended, the wrong
            secret, or the address at which nobody listens.
    """
    if options.size > _SIZE_MAX:
        _fail("ERR_ARGUMENT", f"HOROVOD_SIZE={options.size}: a job has at most {_SIZE_MAX} ranks")
    limit = options.start_timeout_ms / 1000
    deadline = time.monotonic() + limit
    address = join_address(options.rendezvous_host, options.rendezvous_port)
    with closing(_connect(options, deadline, address)) as connection:
        left = max(deadline - time.monotonic(), 0.001)
        connection.socket.settimeout(left)
        try:
            # The response should still arrive when the server gives up.
            connection.send(Register(options.scope, options.rank, options.size, endpoint.hex(),
                                 left - min(left / 4, 0.5), limit))
            response = connection.receive(Endpoints, Refused)
            if isinstance(response, Refused):
                _fail(response.kind, response.message)
            if response is not None:
                each = [connection.receive_content(response.size) for _ in range(options.size)]
                return b"".join(one[:len(endpoint)].ljust(len(endpoint), b"\0") for one in each)
        except (OSError, EOFError):
            pass
    if time.monotonic() >= deadline:
        _fail("ERR_TIMEOUT", f"rendezvous server at {address} did not answer within {_duration(limit)} (scope "
              f"{options.scope})")
    _fail("ERR_PEER_LOST", f"rendezvous server at {address} closed the connection before all ranks had arrived: the "
          f"launcher ended or was restarted (scope {options.scope})")


def _connect(options, deadline, address):
    """Until the server is up and authenticated; it has not acted on connections that it dropped before."""
    pause, longest = _RETRY_SECONDS
    while True:
        try:
            return channel.Connection(options.rendezvous_host, options.rendezvous_port, options.secret,
                                      max(deadline - time.monotonic(), 0.001))
        except OSError as error:
            if isinstance(error, channel.NotAuthenticated) and not isinstance(error, channel.HungUp):
                _fail("ERR_AUTH", f"rendezvous server at {address}: {error}")
            last = error.strerror or error
        time.sleep(max(min(pause, deadline - time.monotonic()), 0))
        pause = min(2 * pause, longest)
        if time.monotonic() >= deadline:
            _fail("ERR_SYSTEM", f"no rendezvous server answered at {address} within "
                  f"{_duration(options.start_timeout_ms / 1000)} ({last}): is the launcher running, and does this host "
                  "reach that address?")


def _fail(kind: str, message: str) -> NoReturn:
    from bagua_hvd.core import native  # late: baguarun answers --help and --check-build without it

    native.raise_failure(native.Failure(getattr(native.lib, f"BHVD_{kind}"), message))
