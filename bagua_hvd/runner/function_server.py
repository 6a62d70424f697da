"""Gives ranks that another launcher starts their function, and collects its results: they connect to this process, and
prove that they know the job's secret, which is in their environment.

The connections also show which rank failed first: not every mpirun ends a job when a process dies without having called
MPI.
"""
import asyncio
import io
import time

from bagua_hvd.job import channel
from bagua_hvd.job.messages import Hello
from bagua_hvd.job.server import HANDSHAKE_SECONDS, Server
from bagua_hvd.runner.function_task import Error, Function, Result
from bagua_hvd.runner.run_files import no_result, unpickled

# Module of the ranks; its argument is ADDRESS,ADDRESS:PORT of the server.
TASK = "bagua_hvd.runner.function_task"


class FunctionServer(Server):
    """Sends the function to the ranks, and receives their results.

        rank to server    hello (its rank), later result or error (nbytes; the pickled result or the text follows)
        server to rank    function (nbytes; its pickle follows)

    Args:
        secret: bytes. function: the bytes of run_task.FUNCTION. host: numeric address to bind.
    Attributes:
        opening_messages: dataclasses of a connection's first message.
        results: {rank: bytes}.
        failures: [(rank, text), ...] in order of arrival; text None: the connection ended without a message.
        unfinished: number of ranks that have not sent everything.
    """

    opening_messages: tuple[type, ...] = (Hello,)

    def __init__(self, secret, function, host):
        self.results = {}
        self.failures = []
        self.unfinished = 0
        self._failed_at = None
        self._function = function
        super().__init__(secret, host, "function server")

    async def serve(self, reader, writer):
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

    async def _serve_rank(self, rank, reader, writer):
        writer.write(channel.encode(Function(len(self._function))))
        writer.write(self._function)
        try:
            await writer.drain()
            said = channel.decode(await reader.readline(), Result, Error)
            content = await reader.readexactly(said.nbytes)
        except (OSError, EOFError, ValueError):
            self.fail(rank, None)
            return
        if isinstance(said, Result):
            self.results[rank] = content
        else:
            self.fail(rank, content.decode(errors="replace"))

    async def serve_other(self, said, reader, writer):
        """Handles another first message of `opening_messages` than Hello; there is none here. As serve()."""
        raise NotImplementedError

    def fail(self, rank, text):
        """Records a rank's failure; see `failures`."""
        self.failures.append((rank, text))
        self._failed_at = self._failed_at or time.monotonic()

    def failed_for(self, seconds):
        """Whether the first failure is at least `seconds` old."""
        return self._failed_at is not None and time.monotonic() > self._failed_at + seconds

    def result(self, rank):
        """The function's result on that rank. RuntimeError: none has arrived, or it cannot be unpickled."""
        if rank not in self.results:
            raise no_result(rank)
        return unpickled(io.BytesIO(self.results.pop(rank)), rank)
