"""Where ranks that somebody else starts get their function, and leave what it returned: they connect to this process,
and prove that they know the job's secret, which travels in the environment.

The connections also tell who failed first: not every mpirun ends a job of which a process died that never called MPI.
"""
import asyncio
import io
import time

from bagua_hvd.job import channel
from bagua_hvd.job.messages import Hello
from bagua_hvd.job.server import HANDSHAKE_SECONDS, Server
from bagua_hvd.runner.desk_task import Error, Function, Result
from bagua_hvd.runner.run_files import no_result, unpickled

# To be started with ADDRESS,ADDRESS:PORT of the desk.
TASK = "bagua_hvd.runner.desk_task"


class Desk(Server):
    """Hands out the function, and takes what comes back.

        rank to desk    hello (its rank), later result or error (nbytes; the pickled result or the text follows)
        desk to rank    function (nbytes; its pickle follows)

    Args:
        secret: bytes. function: the bytes of run_task.FUNCTION. host: numeric address to bind.
    Attributes:
        first_words: dataclasses with which a connection may begin.
        results: {rank: bytes}.
        failures: [(rank, text), ...] in the order they came; text None: the connection ended without a word.
        talking: how many ranks have not said all.
    """

    first_words: tuple[type, ...] = (Hello,)

    def __init__(self, secret, function, host):
        self.results = {}
        self.failures = []
        self.talking = 0
        self._failed_at = None
        self._function = function
        super().__init__(secret, host, "run desk")

    async def talk(self, reader, writer):
        """With one rank."""
        self.talking += 1
        try:
            said = channel.decode(await asyncio.wait_for(reader.readline(), HANDSHAKE_SECONDS), *self.first_words)
            if isinstance(said, Hello):
                await self._serve_rank(said.worker, reader, writer)
                return
        finally:
            self.talking -= 1
        await self.talk_otherwise(said, reader, writer)

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

    async def talk_otherwise(self, said, reader, writer):
        """With one who began with another of `first_words`; there are none here. As talk()."""
        raise NotImplementedError

    def fail(self, rank, text):
        """A rank has failed; see `failures`."""
        self.failures.append((rank, text))
        self._failed_at = self._failed_at or time.monotonic()

    def failed_for(self, seconds):
        """Whether a rank failed so long ago."""
        return self._failed_at is not None and time.monotonic() > self._failed_at + seconds

    def result(self, rank):
        """What the function returned there. RuntimeError: nothing has come, or it cannot be unpickled."""
        if rank not in self.results:
            raise no_result(rank)
        return unpickled(io.BytesIO(self.results.pop(rank)), rank)
