"""One rank of a job that others start: `mpirun ... python -m bagua_hvd.runner.function_task ADDRESS,ADDRESS:PORT`.

It may run on any host. It receives the function from the launcher that listens there, and sends back the result; see
function_server.py. If the launcher ends before that, the rank ends at once: not every mpirun ends its ranks when it is
killed.
"""
import io
import os
import signal
import sys
import threading
from dataclasses import dataclass

from bagua_hvd.core import variables
from bagua_hvd.job.env import get_env_rank_and_size
from bagua_hvd.job.messages import Hello
from bagua_hvd.job.probe import connect
from bagua_hvd.job.secret import HOROVOD_SECRET_KEY
from bagua_hvd.runner.processes import kill_sessions
from bagua_hvd.runner.run_task import Failure, call, say, write

_CONNECT_SECONDS = 20


@dataclass(frozen=True)
class Function:
    """From the launcher: the pickled function follows."""

    nbytes: int


@dataclass(frozen=True)
class Result:
    """The pickled result follows."""

    nbytes: int


@dataclass(frozen=True)
class Error:
    """The text of the error follows."""

    nbytes: int


def _connect(where):
    """The Connection by the first address that reaches the launcher. OSError: none does."""
    addresses, _, port = where.rpartition(":")
    secret = variables.read(HOROVOD_SECRET_KEY)
    try:
        return connect([[address, int(port)] for address in addresses.split(",")], secret, _CONNECT_SECONDS)
    except OSError as error:
        raise ConnectionError(f"this host reaches the launcher at none of {addresses} ({error}): open the ports "
                              "between the hosts, or name the interface they share by network_interfaces") from None


def _die_with_launcher(connection, done):
    connection.receive()        # the launcher sends nothing more, so it has ended
    if not done.is_set():
        kill_sessions({os.getpid()})            # including its children, if mpirun made it a session leader
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    """Ends the process with 0 or 1, through its exit handlers: hvd.shutdown() is one."""
    where = sys.argv.pop()      # so a function that parses sys.argv finds it empty
    try:
        connection = _connect(where)
        connection.send(Hello(get_env_rank_and_size()[0]))
        begin = connection.receive(Function)
        if begin is None:
            raise EOFError("the launcher of the job closed the connection")
        function = connection.receive_content(begin.nbytes)
    except (OSError, EOFError) as error:
        sys.exit(f"bagua_hvd.run: {error}")
    done = threading.Event()
    threading.Thread(target=_die_with_launcher, args=(connection, done), name="launcher", daemon=True).start()
    kind: type[Result] | type[Error]
    try:
        result = io.BytesIO()
        write(call(io.BytesIO(function)), result)
        kind, content = Result, result.getvalue()
    except Failure as failure:
        kind, content = Error, say(failure).encode(errors="replace")
    done.set()
    connection.send(kind(len(content)), content)
    sys.exit(kind is Error)


if __name__ == "__main__":
    main()
