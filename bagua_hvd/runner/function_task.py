"""One rank of run(): `python -m bagua_hvd.runner.function_task ADDRESS,ADDRESS:PORT`.

It may run on any host. It receives the function from the launcher that listens there, or, without addresses, at the
address of the rendezvous, and sends back the result; see run_function.py. If the launcher ends before that, the rank
ends at once: not every mpirun ends its ranks when it is killed.
"""
import io
import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import NoReturn

from bagua_hvd.core import variables
from bagua_hvd.job.channel import HOROVOD_SECRET_KEY, Hello
from bagua_hvd.job.elastic_worker import WORKER, RemovedFromJob
from bagua_hvd.job.environment import get_env_rank_and_size
from bagua_hvd.job.probe import connect
from bagua_hvd.runner.processes import kill_sessions

_CONNECT_SECONDS = 20


@dataclass(frozen=True)
class Function:
    """From the launcher: two pickles follow: its sys.path (None: keep one's own); (func, args, kwargs)."""

    nbytes: int


@dataclass(frozen=True)
class Result:
    """The pickled result follows. rank: the present one; in an elastic job it may have changed since the start."""

    rank: int
    nbytes: int


@dataclass(frozen=True)
class Error:
    """The text of the error follows."""

    nbytes: int


class _Failure(Exception):
    """A sentence that says why there is no result; the cause has the traceback."""


def _call(content):
    """Calls the function in the bytes that follow Function; returns its pickled result. _Failure: there is none."""
    file = io.BytesIO(content)
    path = pickle.load(file)
    if path is not None:
        sys.path[:] = path
    try:
        function, args, kwargs = pickle.load(file)
    except BaseException as error:
        raise _Failure("the function cannot be loaded") from error
    try:
        result = function(*args, **kwargs)
    except RemovedFromJob:
        raise                           # an elastic job continues without this process
    except BaseException as error:      # sys.exit() gives no result either
        raise _Failure("User function raise error") from error
    try:
        import cloudpickle  # late: it is found through the caller's sys.path

        return cloudpickle.dumps(result)
    except BaseException as error:
        raise _Failure("the result cannot be pickled") from error


def _say(failure):
    """Writes the reason for the missing result to stderr, and returns the text."""
    error = failure.__cause__
    # Without this file's frame.
    error.with_traceback(error.__traceback__.tb_next)
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    text = f"{failure}: {summary}\n" + "".join(traceback.format_exception(type(error), error, error.__traceback__))
    sys.stderr.write(text)
    sys.stderr.flush()
    return text


def _connect(where):
    """The Connection by the first address that reaches the launcher. OSError: none does."""
    addresses, _, port = where.rpartition(":")
    addresses = addresses or variables.read("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    secret = variables.read(HOROVOD_SECRET_KEY)
    try:
        return connect([[address, int(port)] for address in addresses.split(",")], secret, _CONNECT_SECONDS)
    except OSError as error:
        raise ConnectionError(f"this host reaches the launcher at none of {addresses} ({error}): open the ports "
                              "between the hosts, or name the interface they share by network_interfaces") from None


def _watch_launcher(connection, done):
    connection.receive()        # the launcher sends nothing more: it has everything, or has ended
    if not done.is_set():
        kill_sessions({os.getpid()})            # including its children, if mpirun made it a session leader
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> NoReturn:
    """Ends the process with 0 or 1, through its exit handlers: hvd.shutdown() is one."""
    where = sys.argv.pop()      # so a function that parses sys.argv finds it empty
    try:
        connection = _connect(where)
        connection.send(Hello(int(variables.read(WORKER)) if variables.given(WORKER) else get_env_rank_and_size()[0]))
        begin = connection.receive(Function)
        if begin is None:
            raise EOFError("the launcher of the job closed the connection")
        function = connection.receive_content(begin.nbytes)
    except (OSError, EOFError) as error:
        sys.exit(f"bagua_hvd.run: {error}")
    done = threading.Event()
    watch = threading.Thread(target=_watch_launcher, args=(connection, done), name="launcher", daemon=True)
    watch.start()
    said: Result | Error
    try:
        content = _call(function)
        said = Result(get_env_rank_and_size()[0], len(content))
    except _Failure as failure:
        content = _say(failure).encode(errors="replace")
        said = Error(len(content))
    done.set()
    connection.send(said, content)
    watch.join()                # the launcher closes the connection when it has received everything
    sys.exit(isinstance(said, Error))


if __name__ == "__main__":
    main()
