"""A job: what those of fixed and of changing size share, and the run of one of fixed size:
connections, addresses, rendezvous, output -> supervisor -> cause of a failure.
"""
import base64
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bagua_hvd.core import variables
from bagua_hvd.job import reporting
from bagua_hvd.job.channel import HOROVOD_SECRET_KEY, make_secret_key, silence_seconds
from bagua_hvd.job.environment import host_hash
from bagua_hvd.job.probe import LOOPBACK, interface_of
from bagua_hvd.job.rendezvous import Rendezvous
from bagua_hvd.job.server import join_address
from bagua_hvd.runner.common.util.hosts import SlotInfo, is_local
from bagua_hvd.runner.output import Console, Descriptor, LineForwarder
from bagua_hvd.runner.reports import Dashboard, Reports
from bagua_hvd.runner.spawner import Spawner, Task
from bagua_hvd.runner.ssh.connection import HostOptions
from bagua_hvd.runner.ssh.network import find_places
from bagua_hvd.runner.supervisor import Supervisor


class WorkerFailed(RuntimeError):
    """A rank ended with a nonzero exit code, and the job with it.

    Attributes:
        rank; exit_code: 128 + n if signal n ended it. process: its name among all processes of the job: the rank, or
            in elastic jobs its number.

    Args:
        details: text after the sentence. process: None: the rank.
    """

    def __init__(self, rank: int, exit_code: int, details: str = "", process: int | None = None) -> None:
        super().__init__(
            "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
            f"terminated. The first process to do so was: Process name: {rank}, Exit code: {exit_code}"
            + _signal_note(exit_code) + details)
        self.rank = rank
        self.exit_code = exit_code
        self.process = rank if process is None else process


class Interrupted(Exception):
    """A signal stopped the job. Attribute signum; SIGPIPE: the output is not read any more."""

    def __init__(self, signum: int) -> None:
        why = "the reader of the output has closed it: " if signum == signal.SIGPIPE else ""
        super().__init__(f"{why}stopped by {signal.Signals(signum).name}")
        self.signum = signum


def _signal_note(exit_code):
    try:
        return f" ({signal.Signals(exit_code - 128).name})"
    except ValueError:
        return ""


def worker_environment(env: Mapping[str, str], slot: SlotInfo, address: str, port: int, secret_key: bytes,
                       interface: str = LOOPBACK) -> dict[str, str]:
    """The environment of the rank at `slot`: the launcher's own, `env`, and the variables of the job.

    Args:
        address, port: of the rendezvous. secret_key: base64 bytes.
        interface: of the rank's host, for connections to other ranks.
    """
    # The command has no use for exported shell functions, and older shells fail on their names. Variables of an outer
    # elastic job do not apply to this one.
    result = {name: value for name, value in env.items()
              if not name.startswith(("BASH_FUNC_", "BAGUA_HVD_ELASTIC_"))
              and name not in ("OLDPWD", "HOROVOD_ELASTIC")}
    result.update({
        **slot.environment,
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface,
        HOROVOD_SECRET_KEY: secret_key.decode(),
        reporting.PIPE: "",         # see processes.Process
    })
    result.setdefault("PYTHONUNBUFFERED", "1")
    return result


def as_horovod_environment(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with startup/ first in PYTHONPATH: `import horovod` then gives bagua_hvd in every Python started."""
    folder = str(Path(__file__).with_name("startup"))
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, [folder, env.get("PYTHONPATH")]))}


@dataclass
class OutputOptions:
    """A directory for the ranks' output, besides the console, and whether lines carry the time."""

    directory: str | None = None
    timestamp: bool = False


def forwarders(console: Console, slot: SlotInfo, output: OutputOptions) -> list[LineForwarder]:
    """The LineForwarders of a rank's stdout and stderr, with files `rank.<rank>/stdout` and `stderr` if requested."""
    streams = ("stdout", "stderr")
    files: list[BinaryIO | None] = [None, None]
    if output.directory is not None:
        # Zero-padded, so that listings are in rank order.
        folder = os.path.join(output.directory, f"rank.{slot.rank:0{len(str(slot.size - 1))}}")
        os.makedirs(folder, exist_ok=True)
        files = [open(os.path.join(folder, stream), "wb") for stream in streams]
    return [LineForwarder(console, slot.rank, stream, output.timestamp, file)
            for stream, file in zip(streams, files, strict=True)]


def host_options(env: Mapping[str, str], ssh_port: int | None = None,
                 ssh_identity_file: str | os.PathLike[str] | None = None, nics: list[str] | None = None) -> HostOptions:
    """The HostOptions for the flags.

    Args:
        env: the launcher's environment, including variables set by its flags.
        nics: names of allowed interfaces; None: those of HOROVOD_GLOO_IFACE, unless an outer job's launcher set it.
    Raises:
        ValueError: the identity file cannot be read, or a variable is malformed.
    """
    if ssh_identity_file is not None and not os.access(ssh_identity_file, os.R_OK):
        raise ValueError(f"ssh identity file {ssh_identity_file}: no such file, or not readable")
    timeout = max(1, int(variables.read("HOROVOD_START_TIMEOUT", env)))
    for name in ("BAGUA_HVD_PORTS", "BAGUA_HVD_GRACE_SECONDS"):         # reports a malformed value now
        variables.read(name, env)
    identity_file = None if ssh_identity_file is None else os.fspath(ssh_identity_file)
    if nics is None and "HOROVOD_RANK" not in env:
        nics = variables.read("HOROVOD_GLOO_IFACE", env)
    return HostOptions(ssh_port, identity_file, timeout, silence_seconds(env), nics)


def run_static(command: list[str], slots: Sequence[SlotInfo], env: dict[str, str], output: OutputOptions,
               options: HostOptions, verbose: bool = False, console: Console | None = None,
               secret_key: bytes | None = None, dashboard: bool = False) -> None:
    """Runs the command once for every slot and returns when all ranks have ended with 0.

    Args:
        command: list of arguments, run without a shell.
        env: the launcher's environment, including variables set by its flags.
        console: None: descriptors 1 and 2.
        secret_key: of the FunctionServer that the command connects to, which also gets the tracebacks; None: it
            connects to none.
        dashboard: whether to show a live table below the ranks' output, on stdout.
    Raises:
        WorkerFailed: the rank whose failure made the others fail; these have BAGUA_HVD_GRACE_SECONDS to end by
            themselves, and are then stopped. Interrupted: a signal stopped the job.
        ValueError: a variable in `env` is malformed.
        RuntimeError: a host cannot be used, or the rendezvous cannot be held.
        OSError: the output directory cannot be written, or a process cannot be started.
        In all cases no process is left running.
    """
    console = console or Console(Descriptor(1), Descriptor(2))
    names = list(dict.fromkeys(slot.hostname for slot in slots))
    local = [name for name in names if is_local(name)]
    remote = [name for name in names if name not in local]
    repeats_traceback = secret_key is None
    secret_key = secret_key or make_secret_key()
    survivors = variables.read("BAGUA_HVD_GRACE_SECONDS", env)
    with ExitStack() as stack:
        table = None
        if dashboard:
            table = stack.enter_context(Dashboard(slots))
            console = table.console
            env = {**env, reporting.VARIABLE: "1"}
        reports = Reports(table)
        spawner = stack.enter_context(Spawner(options, env))
        hosts = spawner.connect(remote, lambda text: console.say(f"baguarun: {text}"))
        _warn_of_duplicate_hosts(console, hosts, local)
        places, address = find_places(hosts, local, options)
        rendezvous = stack.enter_context(Rendezvous(base64.b64decode(secret_key), address))
        if verbose:
            addresses = ", ".join(f"{join_address(place.rendezvous, rendezvous.port)} (by {place.interface} of {name})"
                                  for name, place in places.items())
            console.say(f"baguarun: rendezvous at {addresses}; command: {shlex.join(command)}")
        tasks = []
        for slot in slots:
            place = places[slot.hostname]
            environment = worker_environment(env, slot, place.rendezvous, rendezvous.port, secret_key, place.interface)
            if remote:
                environment.setdefault("NCCL_SOCKET_IFNAME", interface_of(place.interface))
            stdout, stderr = forwarders(console, slot, output)
            tasks.append(Task(slot.rank, command, environment, stdout, reports.filter(slot.rank, slot.rank, stderr),
                              slot.hostname))
            if verbose:
                console.say(f"baguarun: {describe(slot)}")
        supervisor = Supervisor(console, spawner=spawner, survivors_seconds=survivors, find_cause=reports.cause,
                                on_end=rendezvous.rank_ended)
        spawner.say = lambda text: supervisor.call_soon(lambda: console.say(f"baguarun: {text}"))
        outcome = supervisor.run(tasks)
        failed = None
        if outcome.failed is not None:
            failed = WorkerFailed(outcome.failed, outcome.exit_codes[outcome.failed], reports.circumstances(outcome))
            if repeats_traceback:
                reports.repeat_traceback(console, failed.rank, failed.process)
    if outcome.signum is not None:
        raise Interrupted(outcome.signum)
    if failed is not None:
        raise failed


def describe(slot: SlotInfo) -> str:
    """A line that describes a SlotInfo."""
    return (f"rank {slot.rank} of {slot.size}: host {slot.hostname}, local rank {slot.local_rank} of "
            f"{slot.local_size}, cross rank {slot.cross_rank} of {slot.cross_size}")


def _warn_of_duplicate_hosts(console, hosts, local):
    """Warns of two names for one machine: its ranks are numbered as on two hosts, which matters if they share GPUs."""
    seen = {host_hash(): local[0]} if local else {}
    for host in hosts:
        other = seen.setdefault(host.host_hash, host.name)
        if other != host.name:
            console.say(f"baguarun: warning: {other} and {host.name} are the same machine, yet their local ranks are "
                        "numbered as those of two hosts: name it once, with all its slots")
