"""A job: what those of fixed and of changing size share, and the run of one of fixed size:
connections, addresses, rendezvous, output -> supervisor -> cause of a failure.
"""
import base64
import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bagua_hvd.core import variables
from bagua_hvd.job import reporting
from bagua_hvd.job.channel import HOROVOD_SECRET_KEY, make_secret_key, silence_seconds
from bagua_hvd.job.environment import host_hash
from bagua_hvd.job.probe import LOOPBACK, interface_of
from bagua_hvd.job.rendezvous import Rendezvous
from bagua_hvd.job.server import join_address
from bagua_hvd.runner.common.util.hosts import SlotInfo, is_local
from bagua_hvd.runner.output import Console, Descriptor, LineForwarder, Sink
from bagua_hvd.runner.reports import Dashboard, Filter, Reports
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
        try:
            note = f" ({signal.Signals(exit_code - 128).name})"
        except ValueError:
            note = ""
        super().__init__(
            "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
            f"terminated. The first process to do so was: Process name: {rank}, Exit code: {exit_code}"
            + note + details)
        self.rank = rank
        self.exit_code = exit_code
        self.process = rank if process is None else process


class Interrupted(Exception):
    """A signal stopped the job. Attribute signum; SIGPIPE: the output is not read any more."""

    def __init__(self, signum: int) -> None:
        why = "the reader of the output has closed it: " if signum == signal.SIGPIPE else ""
        super().__init__(f"{why}stopped by {signal.Signals(signum).name}")
        self.signum = signum


def worker_environment(env: Mapping[str, str], slot: SlotInfo, address: str, port: int, secret_key: bytes,
                       interface: str = LOOPBACK) -> dict[str, str]:
    """The environment of the rank at `slot`: the launcher's own, `env`, and the variables of the job.

    address, port: of the rendezvous. interface: of the rank's host, for connections to other ranks.
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


class Job:
    """What jobs of fixed and of changing size share.

    Args:
        command: list of arguments, run without a shell.
        env: the launcher's environment, including variables set by its flags.
        options: for other hosts.
        directory: for the ranks' output, besides the console; None: none. timestamp: whether lines carry the time.
        console: None: descriptors 1 and 2.
        secret_key: of the FunctionServer that the command connects to, which also gets the tracebacks; None: it
            connects to none.
        dashboard: whether to show a live table below the ranks' output, on stdout.
    Attributes:
        survivors_seconds: how long other processes may run after a failure.
    Raises:
        ValueError: a variable in `env` is malformed. RuntimeError: the dashboard cannot be shown.
    """

    def __init__(self, command: list[str], env: dict[str, str], options: HostOptions, directory: str | None = None,
                 timestamp: bool = False, console: Console | None = None, secret_key: bytes | None = None,
                 dashboard: bool = False) -> None:
        self.command, self.env, self.options = command, env, options
        self.directory, self._timestamp = directory, timestamp
        self.console = console or Console(Descriptor(1), Descriptor(2))
        self.secret_key = secret_key or make_secret_key()
        self.secret = base64.b64decode(self.secret_key)
        self._repeats_traceback = secret_key is None
        self.survivors_seconds = variables.read("BAGUA_HVD_GRACE_SECONDS", env)
        self._dashboard = Dashboard() if dashboard else None
        self.reports = Reports(self._dashboard)
        self.spawner = Spawner(options, env)
        self._written: set[str] = set()     # paths of output files

    @contextmanager
    def running(self) -> Iterator[None]:
        """The time in which the spawner may be used. If a WorkerFailed ends it, repeats the traceback."""
        with ExitStack() as stack:
            if self._dashboard is not None:
                self.console = stack.enter_context(self._dashboard).console
                self.env = {**self.env, reporting.VARIABLE: "1"}
            stack.enter_context(self.spawner)
            try:
                yield
            except RuntimeError as error:
                failed = error if isinstance(error, WorkerFailed) else error.__cause__
                if isinstance(failed, WorkerFailed) and self._repeats_traceback:
                    self.reports.repeat_traceback(self.console, failed.rank, failed.process)
                raise

    def show(self, slot: SlotInfo) -> None:
        """Begins the line of a rank in the dashboard, if there is one."""
        if self._dashboard is not None:
            self._dashboard.reset_rank(slot)

    def forwarder(self, process: int, rank: int, stream: str, folder: str | None = None) -> Sink:
        """Of "stdout" or "stderr" of a process, which has this rank now.

        Args:
            folder: of the copy, within the output directory; None: none. OSError: it cannot be written.
        """
        file = None
        if self.directory is not None and folder is not None:
            path = os.path.join(self.directory, folder, stream)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = open(path, "ab" if path in self._written else "wb")      # a rank may have several processes in turn
            self._written.add(path)
        forwarder = LineForwarder(self.console, rank, stream, self._timestamp, file)
        return Filter(self.reports, process, rank, forwarder) if stream == "stderr" else forwarder


def run_static(job: Job, slots: Sequence[SlotInfo], verbose: bool = False) -> None:
    """Runs the command once for every slot and returns when all ranks have ended with 0.

    Raises:
        WorkerFailed: the rank whose failure made the others fail; these have BAGUA_HVD_GRACE_SECONDS to end by
            themselves, and are then stopped. Interrupted: a signal stopped the job.
        RuntimeError: a host cannot be used, or the rendezvous cannot be held.
        OSError: the output directory cannot be written, or a process cannot be started.
        In all cases no process is left running.
    """
    names = list(dict.fromkeys(slot.hostname for slot in slots))
    local = [name for name in names if is_local(name)]
    remote = [name for name in names if name not in local]
    with job.running(), ExitStack() as stack:
        console, spawner = job.console, job.spawner
        for slot in slots:
            job.show(slot)
        hosts = spawner.connect(remote, lambda text: console.say(f"baguarun: {text}"))
        _warn_of_duplicate_hosts(console, hosts, local)
        places, address = find_places(hosts, local, job.options)
        rendezvous = stack.enter_context(Rendezvous(job.secret, address))
        if verbose:
            addresses = ", ".join(f"{join_address(place.rendezvous, rendezvous.port)} (by {place.interface} of {name})"
                                  for name, place in places.items())
            console.say(f"baguarun: rendezvous at {addresses}; command: {shlex.join(job.command)}")
        tasks = []
        for slot in slots:
            place = places[slot.hostname]
            env = worker_environment(job.env, slot, place.rendezvous, rendezvous.port, job.secret_key, place.interface)
            if remote:
                env.setdefault("NCCL_SOCKET_IFNAME", interface_of(place.interface))
            folder = f"rank.{slot.rank:0{len(str(slot.size - 1))}}"         # listings are in rank order
            stdout, stderr = (job.forwarder(slot.rank, slot.rank, stream, folder) for stream in ("stdout", "stderr"))
            tasks.append(Task(slot.rank, job.command, env, stdout, stderr, slot.hostname))
            if verbose:
                console.say(f"baguarun: {describe(slot)}")
        supervisor = Supervisor(console, spawner=spawner, survivors_seconds=job.survivors_seconds,
                                find_cause=job.reports.cause, on_end=rendezvous.rank_ended)
        spawner.say = lambda text: supervisor.call_soon(lambda: console.say(f"baguarun: {text}"))
        outcome = supervisor.run(tasks)
        if outcome.signum is not None:
            raise Interrupted(outcome.signum)
        if outcome.failed is not None:
            raise WorkerFailed(outcome.failed, outcome.exit_codes[outcome.failed], job.reports.circumstances(outcome))


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
