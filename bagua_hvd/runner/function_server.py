"""Gives the ranks of run() their function, and collects its results: they connect to this process, and prove that they
know the job's secret, which is in their environment.

The connections also show which rank failed first: not every mpirun ends a job when a process dies without having called
MPI.
"""
import asyncio
import base64
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle

from bagua_hvd.job import channel
from bagua_hvd.job.channel import Hello
from bagua_hvd.job.server import HANDSHAKE_SECONDS, Server
from bagua_hvd.runner.function_task import Error, Function, Result
from bagua_hvd.runner.job import WorkerFailed


def pickled(python: str | None, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """The bytes that follow a function_task.Function.

    Args:
        python: the Python of the ranks.
    Raises:
        Exceptions of cloudpickle: the function or its arguments cannot be pickled.
    """
    # In these folders another Python would find packages built for this one.
    path = [entry for entry in sys.path if isinstance(entry, str)] if python == sys.executable else None
    return pickle.dumps(path) + cloudpickle.dumps((func, args, kwargs))


class FunctionServer(Server):
    """Sends the function to the ranks, and receives their results.

        rank to server    hello (its rank; in an elastic job its number), later result (rank, nbytes) or error (nbytes);
                          the pickled result or the text follows. The server then closes the connection
        server to rank    function (nbytes; the result of pickled() follows)

    Args:
        secret_key: the job's; base64 bytes. function: the result of pickled(). host: numeric address to bind.
    Attributes:
        secret_key, host: see Args.
        opening_messages: dataclasses of a connection's first message.
        failures: [(rank or number, text), ...] in order of arrival; text None: the connection ended without a message.
        unfinished: number of ranks that have not sent everything.
    """

    opening_messages: tuple[type, ...] = (Hello,)

    def __init__(self, secret_key: bytes, function: bytes, host: str) -> None:
        self.secret_key = secret_key
        self.host = host
        self.failures: list[tuple[int, str | None]] = []
        self.unfinished = 0
        self._results: dict[int, bytes] = {}        # by rank
        self._failed_at: float | None = None
        self._function = function
        super().__init__(base64.b64decode(secret_key), host, "function server")

    def command(self, python: str, addresses: Iterable[str] = ()) -> list[str]:
        """The arguments of a rank's process. addresses: of this host; none: that of the rendezvous."""
        return [python, "-m", "bagua_hvd.runner.function_task", f"{','.join(addresses)}:{self.port}"]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Talks to one rank."""
        self.unfinished += 1
        try:
            said = channel.decode(await asyncio.wait_for(reader.readline(), HANDSHAKE_SECONDS), *self.opening_messages)
            if isinstance(said, Hello):
                await self._serve_rank(said.worker, reader, writer)
                return
        finally:
            self.unfinished -= 1
        await self.serve_other(said, reader, writer)

    async def _serve_rank(self, worker, reader, writer):
        writer.write(channel.encode(Function(len(self._function))))
        writer.write(self._function)
        try:
            await writer.drain()
            said = channel.decode(await reader.readline(), Result, Error)
            content = await reader.readexactly(said.nbytes)
        except (OSError, EOFError, ValueError):
            self.fail(worker, None)
            return
        if isinstance(said, Result):
            self._results[said.rank] = content
        else:
            self.fail(worker, content.decode(errors="replace"))

    async def serve_other(self, said: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles another first message of `opening_messages` than Hello; there is none here. As serve()."""
        raise NotImplementedError

    def fail(self, worker: int, text: str | None) -> None:
        """Records a rank's failure; see `failures`."""
        self.failures.append((worker, text))
        self._failed_at = self._failed_at or time.monotonic()

    def failed_for(self, seconds: float) -> bool:
        """Whether the first failure is at least `seconds` old."""
        return self._failed_at is not None and time.monotonic() > self._failed_at + seconds

    def explained(self, error: WorkerFailed, own: bool = False) -> WorkerFailed:
        """The WorkerFailed with the text of the rank that was the first to report an error.

        It may not be the first to end: its exit handlers take time, and a collective fails the others meanwhile. A
        process that ended without a report had no such delay: it stays the first.

        Args:
            own: it stays the first in any case, as in an elastic job, whose workers survive errors of the others.
        """
        texts = {worker: text for worker, text in self.failures if text is not None}
        if error.process not in texts:
            return error
        rank, text = (error.rank, texts[error.process]) if own else next(iter(texts.items()))
        return WorkerFailed(rank, error.exit_code if rank == error.rank else 1, f"\n\nRank {rank}: {text}")

    def result(self, rank: int) -> Any:
        """The function's result on that rank. RuntimeError: none has arrived, or it cannot be unpickled."""
        if rank not in self._results:
            raise RuntimeError(f"Process name: {rank}, Exit code: 0: the process ended before the function returned, "
                               "so there is no result")
        try:
            return pickle.loads(self._results.pop(rank))
        except Exception as error:
            raise RuntimeError(f"the result of rank {rank} cannot be unpickled: {type(error).__name__}: {error}"
                               ) from error
