"""run(use_mpi=True): mpirun starts the ranks, which get the function from here, and send back what it returned.

MPI has no way to give a function to processes that need not call MPI, and hosts need not share a folder: so the ranks
connect to this process, and prove that they know the job's secret, which travels in the environment. The connections
also tell who failed first: not every mpirun ends a job of which a process died that never called MPI.
"""
import asyncio
import base64
import io
import time

from bagua_hvd.job import channel, probe
from bagua_hvd.job.messages import Hello
from bagua_hvd.job.secret import HOROVOD_SECRET_KEY, make_secret_key
from bagua_hvd.job.server import HANDSHAKE_SECONDS, Server
from bagua_hvd.runner import mpi_run
from bagua_hvd.runner.job import Interrupted, WorkerFailed, is_local, plan
from bagua_hvd.runner.output import LineForwarder
from bagua_hvd.runner.run_files import no_result, unpickled, with_report
from bagua_hvd.runner.run_mpi_task import Error, Function, Result
from bagua_hvd.runner.supervisor import Supervisor, Task

_TASK = "bagua_hvd.runner.run_mpi_task"
_MPIRUN = "mpirun"
# After a failure mpirun may end the job by itself, and say more about it than we know.
_MPIRUN_SECONDS = 2
# What ranks sent before they ended arrives.
_ARRIVAL_SECONDS = 5


class Desk(Server):
    """Hands out the function, and takes what comes back.

        rank to desk    hello (its rank), later result or error (nbytes; the pickled result or the text follows)
        desk to rank    function (nbytes; its pickle follows)

    Args:
        secret: bytes. function: the bytes of run_task.FUNCTION. host: numeric address to bind.
    Attributes:
        results: {rank: bytes}.
        failures: [(rank, text), ...] in the order they came; text None: the connection ended without a word.
        talking: how many ranks have not said all.
    """

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
            rank = channel.decode(await asyncio.wait_for(reader.readline(), HANDSHAKE_SECONDS), Hello).worker
            writer.write(channel.encode(Function(len(self._function))))
            writer.write(self._function)
            try:
                await writer.drain()
                said = channel.decode(await reader.readline(), Result, Error)
                content = await reader.readexactly(said.nbytes)
            except (OSError, EOFError, ValueError):
                self._fail(rank, None)
                return
            if isinstance(said, Result):
                self.results[rank] = content
            else:
                self._fail(rank, content.decode(errors="replace"))
        finally:
            self.talking -= 1

    def _fail(self, rank, text):
        self.failures.append((rank, text))
        self._failed_at = self._failed_at or time.monotonic()

    def should_stop(self):
        """Whether a rank has failed, and mpirun had its time to end the others."""
        return self._failed_at is not None and time.monotonic() > self._failed_at + _MPIRUN_SECONDS


def run_by_mpirun(args, hosts, env, python, function, console):
    """Runs the function on args.num_proc ranks; returns their results, in the order of the ranks.

    Args:
        args: as mpi_run.command's, without the command. hosts: `h1:2,h2:2`; None: this host.
        env: the launcher's environment, with what the arguments set. python: of the ranks.
        function: the bytes of run_task.FUNCTION. console: Console.
    Raises:
        As run().
    """
    slots = plan(args.num_proc, hosts)
    here = all(is_local(slot.hostname) for slot in slots)
    secret_key = make_secret_key()
    env = {**mpi_run.environment(env), HOROVOD_SECRET_KEY: secret_key.decode()}
    with Desk(base64.b64decode(secret_key), function, "127.0.0.1" if here else "0.0.0.0") as desk:
        addresses = ["127.0.0.1"] if here else [address for _, address in probe.addresses(args.nics)]
        args.command = [python, "-m", _TASK, f"{','.join(addresses)}:{desk.port}"]
        command = mpi_run.command(args, hosts, env)
        # Its lines say already which rank they are of.
        output = [LineForwarder(console, None, stream) for stream in ("stdout", "stderr")]
        outcome = Supervisor(console, desk.should_stop, report_failures=False).run(
            [Task(_MPIRUN, command, env, *output)])
        if outcome.signum is not None:
            raise Interrupted(outcome.signum)
        end = time.monotonic() + _ARRIVAL_SECONDS
        while desk.talking and time.monotonic() < end:
            time.sleep(0.01)
    exit_code = outcome.exit_codes[_MPIRUN]
    if desk.failures:
        raise _explained(*desk.failures[0], exit_code)
    if exit_code != 0:
        raise RuntimeError(f"mpirun ended with exit code {exit_code}: its output says why")
    return [_result(desk, rank) for rank in range(args.num_proc)]


def _explained(rank, text, exit_code):
    if text is not None:
        return with_report(rank, 1, text)
    return WorkerFailed(rank, exit_code, ". That is mpirun's exit code; the process ended before the function "
                        "returned, without a word")


def _result(desk, rank):
    if rank not in desk.results:
        raise no_result(rank)
    return unpickled(io.BytesIO(desk.results.pop(rank)), rank)
