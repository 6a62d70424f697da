"""run(use_mpi=True): mpirun starts the ranks, which get the function from here, and send back what it returned.

MPI has no way to give a function to processes that need not call MPI, and hosts need not share a folder: so the ranks
connect to this process; see desk.py.
"""
import base64
import time

from bagua_hvd.core import variables
from bagua_hvd.job.ports import EVERY_INTERFACE
from bagua_hvd.job.secret import HOROVOD_SECRET_KEY, make_secret_key
from bagua_hvd.runner import mpi_run
from bagua_hvd.runner.desk import TASK, Desk
from bagua_hvd.runner.job import Interrupted, WorkerFailed, is_local, plan
from bagua_hvd.runner.output import LineForwarder
from bagua_hvd.runner.run_files import with_report
from bagua_hvd.runner.ssh.network import own_addresses
from bagua_hvd.runner.supervisor import Supervisor, Task

_MPIRUN = "mpirun"
# After a failure mpirun may end the job by itself, and say more about it than we know: so it has this time at least.
_MPIRUN_SECONDS = 2
# What ranks sent before they ended arrives.
_ARRIVAL_SECONDS = 5


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
    survivors = max(_MPIRUN_SECONDS, variables.read("BAGUA_HVD_GRACE_SECONDS", env))
    env = {**mpi_run.environment(env), HOROVOD_SECRET_KEY: secret_key.decode()}
    with Desk(base64.b64decode(secret_key), function, "127.0.0.1" if here else EVERY_INTERFACE) as desk:
        addresses = ["127.0.0.1"] if here else [address for _, address in own_addresses(args.nics)]
        args.command = [python, "-m", TASK, f"{','.join(addresses)}:{desk.port}"]
        command = mpi_run.command(args, hosts, env)
        # Its lines say already which rank they are of.
        stdout, stderr = (LineForwarder(console, None, stream) for stream in ("stdout", "stderr"))
        outcome = Supervisor(console, lambda: desk.failed_for(survivors), report_failures=False).run(
            [Task(_MPIRUN, command, env, stdout, stderr)])
        if outcome.signum is not None:
            raise Interrupted(outcome.signum)
        end = time.monotonic() + _ARRIVAL_SECONDS
        while desk.talking and time.monotonic() < end:
            time.sleep(0.01)
    exit_code = outcome.exit_codes[_MPIRUN]
    if desk.failures:
        rank, text = desk.failures[0]
        raise _explained(rank, text, exit_code)
    if exit_code != 0:
        raise RuntimeError(f"mpirun ended with exit code {exit_code}: its output says why")
    return [desk.result(rank) for rank in range(args.num_proc)]


def _explained(rank, text, exit_code):
    if text is not None:
        return with_report(rank, 1, text)
    return WorkerFailed(rank, exit_code, ". That is mpirun's exit code; the process ended before the function "
                        "returned, without a word")
