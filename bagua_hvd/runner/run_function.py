"""`run`: calls a Python function on every rank of a job, and returns the results in a list.

The ranks fetch the function from this process, and send back the results: see FunctionServer, and function_task.py,
which the ranks execute. For everything else it uses run_static or run_elastic, like baguarun, or mpirun: mpi_run.py.
"""
import argparse
import asyncio
import base64
import io
import operator
import os
import pickle
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

import cloudpickle

from bagua_hvd.core.util import deprecated
from bagua_hvd.job import channel
from bagua_hvd.job.channel import Hello, make_secret_key
from bagua_hvd.job.probe import interface_names
from bagua_hvd.job.server import HANDSHAKE_SECONDS, Server
from bagua_hvd.runner import job
from bagua_hvd.runner.common.util import config_parser
from bagua_hvd.runner.common.util.hosts import bind_address, parse_host_files, plan
from bagua_hvd.runner.elastic.run import listen_address, plan_elastic, run_elastic
from bagua_hvd.runner.flags import TABLE
from bagua_hvd.runner.function_task import Error, Function, Result
from bagua_hvd.runner.mpi_run import run_by_mpirun
from bagua_hvd.runner.output import Console, Descriptor, TextStream


class _HorovodArgs(argparse.Namespace):
    """The result of parse_args() without a command line: an attribute for each of Horovod's flags, and for run()."""

    def __init__(self, **given):
        super().__init__(**{**dict.fromkeys((*TABLE, "command", "executable", "nics", "run_func")), "num_proc": 1,
                            **given})


def run(func: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, num_proc: int = 1,
        min_num_proc: int | None = None, max_num_proc: int | None = None, slots: int | None = None,
        reset_limit: int | None = None, cooldown_range: Sequence[int] | None = None, hosts: str | None = None,
        hostfile: str | None = None, host_discovery_script: str | None = None, start_timeout: int | None = None,
        ssh_port: int | None = None, ssh_identity_file: str | None = None, disable_cache: bool | None = None,
        output_filename: str | None = None, verbose: Any = None, use_gloo: bool | None = None,
        use_mpi: bool | None = None, mpi_args: str | None = None, network_interface: Any = None,
        network_interfaces: Any = None, executable: str | None = None, np: int | None = None,
        min_np: int | None = None, max_np: int | None = None) -> Any:
    """Calls func(*args, **kwargs) on every rank of a job, and returns when all have ended.

    The ranks are new processes that find modules where this one does; their output is prefixed and goes to sys.stdout
    and sys.stderr. cloudpickle sends the code of lambdas and of __main__'s functions and classes; of importable modules
    only the name.

    Args:
        func: may call hvd.init(), but need not.
        num_proc: number of ranks; of an elastic job: at the start.
        min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, host_discovery_script: as the flags --min-np,
            --max-np, --slots-per-host, --reset-limit, --blacklist-cooldown-range and --host-discovery-script of
            baguarun. The first and the last make the job elastic; num_proc is then at least min_num_proc.
        hosts: `h1:4,h2:4`; hostfile: a file with lines `h1 slots=4`. Default: as many slots on this host as ranks.
            Others are reached by ssh; they need the same Python with bagua_hvd, and the current folder.
        start_timeout: seconds to reach all hosts, and then until all ranks must have called init(); default 30, or
            HOROVOD_START_TIMEOUT.
        ssh_port, ssh_identity_file: of sshd on all hosts; the private key.
        network_interface, network_interfaces: names of the allowed ones, `eth0,eth1` or a list; default: found by
            trying.
        output_filename: a folder: the ranks' unchanged output also goes to `rank.<rank>/stdout` and `stderr` there.
        verbose: shows the plan of the job on stderr.
        use_gloo: accepted for compatibility with Horovod: the built-in transports.
        use_mpi: starts the job by the mpirun in PATH, like baguarun's --mpi; mpi_args: further arguments for it. mpirun
            then prefixes the ranks' output; MPICH's has no ssh_port, ssh_identity_file and output_filename.
        executable: the Python of the ranks; default sys.executable. Another one finds modules in its own folders.
        disable_cache: no effect.
        np, min_np, max_np: deprecated names of num_proc, min_num_proc, max_num_proc.
    Returns:
        The list of func's results in rank order; in an elastic job, of the first min_num_proc ranks.
    Raises:
        RuntimeError: a rank failed, and the others were stopped; the text names it, with its traceback if the function
            raised or the result cannot be pickled. Or a host cannot be used, or the native extension is not built.
        ValueError: arguments that are wrong or exclude each other, or too few slots. TypeError: func is not callable.
        KeyboardInterrupt: Ctrl-C stopped the job. SIGTERM and SIGHUP also stop it, and then take their usual effect.
            BrokenPipeError: the output is not read any more. OSError: no process, folder or file can be made, or no
            mpirun is found.
        Exceptions of cloudpickle: func or its arguments cannot be pickled.
        In all cases no process of the job is left running.
    """
    num_proc = _renamed("np", np, "num_proc", num_proc)
    min_num_proc = _renamed("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = _renamed("max_np", max_np, "max_num_proc", max_num_proc)
    elastic = min_num_proc is not None or host_discovery_script is not None
    _check_elastic(elastic, max_num_proc=max_num_proc, slots=slots, reset_limit=reset_limit,
                   cooldown_range=cooldown_range)
    if not callable(func):
        raise TypeError(f"func is {func!r}: give a function, which run() calls on every rank")
    env = _environment(start_timeout, cooldown_range, reset_limit)
    hosts = _hosts(hosts, hostfile, host_discovery_script)
    _check_controller(use_gloo, use_mpi, mpi_args, elastic)
    num_proc = _count(num_proc)
    if elastic:
        min_num_proc = num_proc if min_num_proc is None else min_num_proc
        discovery, settings = plan_elastic(env, max(num_proc, min_num_proc), min_num_proc, max_num_proc,
                                           host_discovery_script, slots, hosts, reset_limit)
        ranks, bound = range(min_num_proc), listen_address(discovery, settings)
    else:
        rank_plan = plan(num_proc, hosts)
        ranks, bound = range(num_proc), bind_address(slot.hostname for slot in rank_plan)
    nics = interface_names(network_interface, network_interfaces)
    options = job.host_options(env, ssh_port, ssh_identity_file, nics)
    python = _python(executable)
    directory = None if output_filename is None else os.fspath(output_filename)
    function = pickled(python, func, tuple(args), dict(kwargs or {}))
    with FunctionServer(make_secret_key(), function, bound) as server:
        try:
            with _console() as console:
                if use_mpi:
                    flags = _HorovodArgs(num_proc=num_proc, ssh_port=ssh_port, ssh_identity_file=ssh_identity_file,
                                         output_filename=directory, mpi_args=mpi_args, nics=nics)
                    run_by_mpirun(flags, hosts, env, python, server, console)
                else:
                    made = job.Job(server.command(python), env, options, directory, console=console,
                                   secret_key=server.secret_key)
                    if elastic:
                        run_elastic(made, discovery, settings, cooldown_range)
                    else:
                        job.run_static(made, rank_plan, bool(verbose))
        except job.WorkerFailed as error:
            raise server.explained(error, elastic) from None
        except job.Interrupted as error:
            interrupted = error
        except RuntimeError as error:
            if isinstance(error.__cause__, job.WorkerFailed):
                raise error from server.explained(error.__cause__, elastic)
            raise
        else:
            return [server.result(rank) for rank in ranks]
    _pass_on(interrupted)


# ---- arguments --------------------------------------------------------------------------------------------------

def _renamed(old_name, old, name, value):
    if old is None:
        return value
    deprecated(f"run: {old_name}", name)
    return old


def _check_controller(use_gloo, use_mpi, mpi_args, elastic):
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi exclude each other: leave out both")
    if use_mpi and elastic:
        raise ValueError("use_mpi: mpirun starts no elastic jobs; leave it out, or min_num_proc and "
                         "host_discovery_script")
    if mpi_args and not use_mpi:
        warnings.warn("run: mpi_args has no effect without use_mpi", stacklevel=3)


def _hosts(hosts, hostfile, script):
    """`h1:2,h2:2`, or None. ValueError: see run()."""
    if sum(value is not None for value in (hosts, hostfile, script)) > 1:
        raise ValueError("hosts, hostfile and host_discovery_script exclude each other: give one of them")
    return parse_host_files(hostfile) if hostfile is not None else hosts


def _count(num_proc):
    try:
        count = operator.index(num_proc)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"num_proc={num_proc!r} is not a number of processes: give an integer from 1 on")
    return count


def _check_elastic(elastic, **arguments):
    given = [name for name, value in arguments.items() if value is not None]
    if given and not elastic:
        raise ValueError(f"{', '.join(given)}: these are for elastic jobs; give min_num_proc or host_discovery_script")


def _environment(start_timeout, cooldown_range, reset_limit):
    args = _HorovodArgs(start_timeout=start_timeout, cooldown_range=cooldown_range, reset_limit=reset_limit)
    config_parser.validate_config_args(args)
    env = config_parser.set_env_from_args(dict(os.environ), args)
    # The function may use `import horovod.torch`, like its caller.
    return job.as_horovod_environment(env) if sys.modules.get("horovod") is sys.modules["bagua_hvd"] else env


def _python(executable):
    python = sys.executable if executable is None else os.fspath(executable)
    if not shutil.which(python):
        raise ValueError(f"executable {python!r}: no such program, or not executable; name the Python for the ranks")
    return python


# ---- the caller's process ---------------------------------------------------------------------------------------

@contextmanager
def _console():
    """The Console on sys.stdout and sys.stderr, which may be a terminal's, a notebook's, or None."""
    with ExitStack() as stack:
        sinks = []
        for given, original in ((sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)):
            stream: TextIO = stack.enter_context(open(os.devnull, "w")) if given is None else given
            stream.flush()
            try:
                # A Descriptor stays responsive while nobody reads; a replaced stream must be used itself.
                sinks.append(Descriptor(stream.fileno()) if stream is original else TextStream(stream))
            except (AttributeError, io.UnsupportedOperation):
                sinks.append(TextStream(stream))
        yield Console(*sinks)


def _pass_on(interrupted):
    """Gives the signal the effect that it would have had without the job."""
    if interrupted.signum == signal.SIGPIPE:
        raise BrokenPipeError(str(interrupted))
    handler = signal.getsignal(interrupted.signum)
    if callable(handler):
        handler(interrupted.signum, None)
    elif interrupted.signum != signal.SIGINT:
        signal.raise_signal(interrupted.signum)
    if interrupted.signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise RuntimeError(str(interrupted))


# ---- the ranks' functions and results ----------------------------------------------------------------------------

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
    """Sends the function to the ranks, and receives their results. They connect to this process, and prove that they
    know the job's secret, which is in their environment.

    The connections also show which rank failed first: not every mpirun ends a job when a process dies without having
    called MPI. A rank sends Hello (its rank; in an elastic job its number), receives Function, and sends Result or
    Error; then the server closes the connection.

    Args:
        secret_key: the job's; base64 bytes. function: the result of pickled(). host: numeric address to bind.
    Attributes:
        failures: [(rank or number, text), ...] in order of arrival; text None: the connection ended without a message.
        unfinished: number of ranks that have not sent everything.
    """

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
        said = channel.decode(await asyncio.wait_for(reader.readline(), HANDSHAKE_SECONDS), Hello)
        await self.serve_rank(said.worker, reader, writer)

    async def serve_rank(self, worker: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Talks to one rank after its hello."""
        self.unfinished += 1
        try:
            writer.write(channel.encode(Function(len(self._function))))
            writer.write(self._function)
            await writer.drain()
            said = channel.decode(await reader.readline(), Result, Error)
            content = await reader.readexactly(said.nbytes)
            if isinstance(said, Result):
                self._results[said.rank] = content
            else:
                self.fail(worker, content.decode(errors="replace"))
        except (OSError, EOFError, ValueError):
            self.fail(worker, None)
        finally:
            self.unfinished -= 1

    def fail(self, worker: int, text: str | None) -> None:
        """Records a rank's failure; see `failures`."""
        self.failures.append((worker, text))
        self._failed_at = self._failed_at or time.monotonic()

    def failed_for(self, seconds: float) -> bool:
        """Whether the first failure is at least `seconds` old."""
        return self._failed_at is not None and time.monotonic() > self._failed_at + seconds

    def explained(self, error: job.WorkerFailed, own: bool = False) -> job.WorkerFailed:
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
        return job.WorkerFailed(rank, error.exit_code if rank == error.rank else 1, f"\n\nRank {rank}: {text}")

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
