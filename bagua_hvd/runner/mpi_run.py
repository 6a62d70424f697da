"""Jobs whose ranks mpirun starts: its command, for `baguarun --mpi`, and run(use_mpi=True).

The ranks then find each other by themselves: job/join.py. The flags of Open MPI (also Spectrum MPI) and MPICH's hydra
(also Intel MPI) differ; `mpirun --version` says which one is in PATH.

run() sends its function through a FunctionServer: MPI cannot send one to processes that need not call MPI.
"""
import shlex
import shutil
import subprocess
import time
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.job.channel import HOROVOD_SECRET_KEY
from bagua_hvd.job.elastic_worker import DRIVER, WORKER
from bagua_hvd.job.environment import PLACE
from bagua_hvd.job.server import EVERY_INTERFACE
from bagua_hvd.runner.common.util.hosts import parse_hosts
from bagua_hvd.runner.job import Interrupted, WorkerFailed
from bagua_hvd.runner.output import Console, LineForwarder
from bagua_hvd.runner.spawner import Task
from bagua_hvd.runner.ssh.connection import flags, forwarded
from bagua_hvd.runner.ssh.network import own_addresses
from bagua_hvd.runner.supervisor import Supervisor

_OPEN_MPI = ("Open MPI", "OpenRTE", "Spectrum MPI")
_HYDRA = ("HYDRA", "MPICH", "Intel(R) MPI")
_VERSION_SECONDS = 20
# After a failure mpirun may end the job by itself, with a better message than ours: it has at least this time.
_MPIRUN_SECONDS = 2
# Time for messages of ended ranks to arrive.
_ARRIVAL_SECONDS = 5
# Variables of the job that the caller itself is a rank of.
_OURS = {*PLACE, "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_ELASTIC", DRIVER, WORKER}


def _mpirun(env):
    """(path, whether it is Open MPI's). FileNotFoundError: there is no known mpirun that responds."""
    path = shutil.which("mpirun", path=env.get("PATH"))
    if path is None:
        raise FileNotFoundError("--mpi: mpirun is not in PATH: install an MPI, such as `pip install mpich`")
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, env=env,
                              timeout=_VERSION_SECONDS).stdout
    except subprocess.TimeoutExpired:
        raise FileNotFoundError(f"--mpi: `{path} --version` did not return within {_VERSION_SECONDS} s: check "
                                "what it waits for, or start the job by another mpirun") from None
    except OSError as error:
        raise FileNotFoundError(f"--mpi: {path} cannot be run: {error.strerror}; start the job by another "
                                "mpirun") from None
    for names, is_open_mpi in ((_OPEN_MPI, True), (_HYDRA, False)):
        if any(name in text for name in names):
            return path, is_open_mpi
    raise FileNotFoundError(f"--mpi: {path} is neither Open MPI's nor MPICH's: start the job by it yourself")


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """`env` for mpirun: the ranks use MPI between hosts, unless `env` says otherwise, and detect their own ranks."""
    kept = {name: value for name, value in env.items() if name not in _OURS}
    return {"BAGUA_HVD_TRANSPORT": "mpi", **kept}


def command(args: Namespace, hosts: str | None, env: Mapping[str, str]) -> list[str]:
    """The arguments of mpirun.

    Args:
        args: the parsed flags of baguarun.
        hosts: `h1:2,h2:2`; None: those of Slurm's allocation if it has several, else this host.
        env: the environment to pass on.
    Raises:
        FileNotFoundError: no mpirun. ValueError: malformed hosts, or flags that this mpirun does not have.
    """
    path, is_open_mpi = _mpirun(env)
    if hosts is not None:
        parse_hosts(hosts)
    if not is_open_mpi and (args.ssh_port or args.ssh_identity_file or args.output_filename):
        raise ValueError("--mpi: MPICH's mpirun has no --ssh-port, --ssh-identity-file and --output-filename: leave "
                         "them out, and set up ssh in ~/.ssh/config")
    start = _open_mpi(args, hosts, env) if is_open_mpi else _hydra(args, hosts, env)
    return [path, *start, *shlex.split(args.mpi_args or ""), *args.command]


def _open_mpi(args, hosts, env):
    start = ["--allow-run-as-root", "--tag-output", "-np", str(args.num_proc)]
    if hosts is not None or env.get("SLURM_JOB_NUM_NODES", "1") == "1":      # else Open MPI finds Slurm's hosts
        start += ["-H", hosts or f"localhost:{args.num_proc}"]
    start += shlex.split(args.binding_args or "--bind-to none --map-by slot")
    if args.tcp_flag:
        start += ["--mca", "pml", "ob1", "--mca", "btl", "^openib"]
    if args.nics:
        start += ["--mca", "btl_tcp_if_include", ",".join(args.nics)]
        if "NCCL_SOCKET_IFNAME" not in env:
            start += ["-x", f"NCCL_SOCKET_IFNAME={','.join(args.nics)}"]
    if ssh := flags(args.ssh_port, args.ssh_identity_file):
        start += ["--mca", "plm_rsh_args", shlex.join(ssh)]
    if args.output_filename:
        start += ["--output-filename", args.output_filename]
    for name in sorted(forwarded(env)):
        start += ["-x", name]
    return start


def _hydra(args, hosts, env):
    start = ["-prepend-rank", "-n", str(args.num_proc), "-bind-to", "none"]
    if args.binding_args:
        start[-2:] = shlex.split(args.binding_args)
    if hosts:
        start += ["-hosts", hosts]
    if args.nics:
        start += ["-iface", args.nics[0]]
    return [*start, "-genvlist", ",".join(sorted(forwarded(env)))]


def run_by_mpirun(args: Namespace, hosts: str | None, env: Mapping[str, str], python: str, server: Any,
                  console: Console) -> None:
    """Runs a function on args.num_proc ranks.

    Args:
        args: as for command(), without the command. hosts: `h1:2,h2:2`; None: this host.
        env: the launcher's environment, including variables set by the arguments. python: of the ranks.
        server: run()'s FunctionServer.
    Raises:
        As run_static(); ValueError, FileNotFoundError: see command().
    """
    hosts = hosts or f"localhost:{args.num_proc}"
    survivors = max(_MPIRUN_SECONDS, variables.read("BAGUA_HVD_GRACE_SECONDS", env))
    env = {**environment(env), HOROVOD_SECRET_KEY: server.secret_key.decode()}
    addresses = [server.host]
    if server.host == EVERY_INTERFACE:
        addresses = [address for _, address in own_addresses(args.nics)]
    args.command = server.command(python, addresses)
    # mpirun already prefixes lines with their rank.
    stdout, stderr = (LineForwarder(console, None, stream) for stream in ("stdout", "stderr"))
    outcome = Supervisor(console, lambda: server.failed_for(survivors), report_failures=False).run(
        [Task("mpirun", command(args, hosts, env), env, stdout, stderr)])
    if outcome.signum is not None:
        raise Interrupted(outcome.signum)
    end = time.monotonic() + _ARRIVAL_SECONDS
    while server.unfinished and time.monotonic() < end:
        time.sleep(0.01)
    exit_code = outcome.exit_codes["mpirun"]
    if server.failures:
        rank, text = server.failures[0]
        raise WorkerFailed(rank, 1) if text is not None else WorkerFailed(
            rank, exit_code, ". That is mpirun's exit code; the process ended before the function returned, without an "
            "error message")
    if exit_code != 0:
        raise RuntimeError(f"mpirun ended with exit code {exit_code}: its output says why")
