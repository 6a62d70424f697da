"""A job whose ranks all run on this host."""
import base64
import ipaddress
import os
import shlex
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from bagua_hvd.runner.common.util import hosts
from bagua_hvd.runner.common.util.secret import HOROVOD_SECRET_KEY, make_secret_key
from bagua_hvd.runner.output import Console, Descriptor, LineForwarder
from bagua_hvd.runner.rendezvous import Rendezvous
from bagua_hvd.runner.supervisor import Supervisor, Task

_LOOPBACK = "lo"


class WorkerFailed(RuntimeError):
    """A rank ended with a nonzero exit code, and the job with it.

    Attributes:
        rank; exit_code: 128 + n when signal n ended it.

    Args:
        details: text that follows the sentence.
    """

    def __init__(self, rank, exit_code, details=""):
        super().__init__(
            "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
            f"terminated. The first process to do so was: Process name: {rank}, Exit code: {exit_code}"
            + _signal_note(exit_code) + details)
        self.rank = rank
        self.exit_code = exit_code


class Interrupted(Exception):
    """A signal stopped the job. Attribute signum; SIGPIPE: nobody reads the output any more."""

    def __init__(self, signum):
        why = "nobody reads the output any more, " if signum == signal.SIGPIPE else ""
        super().__init__(f"{why}stopped by {signal.Signals(signum).name}")
        self.signum = signum


def _signal_note(exit_code):
    try:
        return f" ({signal.Signals(exit_code - 128).name})"
    except ValueError:
        return ""


def is_local(hostname):
    """Whether the name means this host: localhost, a loopback address, or the host's own name."""
    try:
        return ipaddress.ip_address(hostname).is_loopback
    except ValueError:
        own = socket.gethostname()
        return hostname.lower() in {"localhost", own.lower(), own.split(".")[0].lower()}


def plan_local(num_proc, hosts_string=None):
    """SlotInfos for num_proc ranks on this host.

    Args:
        hosts_string: `localhost:2,127.0.0.1:2`; None: as many slots as ranks.
    Raises:
        ValueError: malformed, or too few slots. NotImplementedError: a host that is not this one.
    """
    infos = hosts.parse_hosts(f"localhost:{num_proc}" if hosts_string is None else hosts_string)
    remote = [info.hostname for info in infos if not is_local(info.hostname)]
    if remote:
        raise NotImplementedError(f"remote hosts are not supported by this version yet: {', '.join(remote)}; name only "
                                  f"this host, such as localhost:{num_proc}, or name none")
    try:
        return hosts.get_host_assignments(infos, num_proc, num_proc)
    except ValueError as error:
        raise ValueError(f"{error}: ask for fewer processes, or give the hosts more slots") from None


def worker_environment(env, slot, address, port, secret_key):
    """The environment of the rank at `slot`: what the launcher's own, `env`, holds and a job needs besides.

    Args:
        slot: SlotInfo.
        address, port: where the ranks meet.
        secret_key: base64 bytes.
    """
    # Exported shell functions are no use to the command, and older shells choke on their names.
    result = {name: value for name, value in env.items() if not name.startswith("BASH_FUNC_") and name != "OLDPWD"}
    result.update({
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": _LOOPBACK,
        HOROVOD_SECRET_KEY: secret_key.decode(),
        "PYTHONUNBUFFERED": "1",
    })
    return result


def as_horovod_environment(env):
    """`env` with startup/ as the first of PYTHONPATH: `import horovod` gives bagua_hvd in every Python started."""
    folder = str(Path(__file__).with_name("startup"))
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, [folder, env.get("PYTHONPATH")]))}


@dataclass
class OutputOptions:
    """Where the ranks' output goes besides the console (directory), and whether lines carry the time."""

    directory: str | None = None
    timestamp: bool = False


def run_local(command, slots, env, output=None, verbose=False, console=None):
    """Runs the command once for every slot and returns when all ranks ended with 0.

    Args:
        command: list of arguments; no shell takes part.
        slots: SlotInfos, all of this host.
        env: the launcher's environment, with what its flags set.
        output: OutputOptions.
        console: Console; None: descriptors 1 and 2.
    Raises:
        WorkerFailed: the first rank that failed; the others are stopped. Interrupted: a signal stopped the job.
        RuntimeError: no rendezvous. OSError: the output directory cannot be written, or a process not started.
        In all cases no process is left.
    """
    output = output or OutputOptions()
    console = console or Console(Descriptor(1), Descriptor(2))
    secret_key = make_secret_key()
    with Rendezvous(base64.b64decode(secret_key)) as rendezvous:
        if verbose:
            console.say(f"baguarun: the ranks meet at {rendezvous.host}:{rendezvous.port}; command: "
                        + shlex.join(command))
        tasks = []
        for slot in slots:
            stdout, stderr = _forwarders(console, slot, output)
            environment = worker_environment(env, slot, rendezvous.host, rendezvous.port, secret_key)
            tasks.append(Task(slot.rank, command, environment, stdout, stderr))
            if verbose:
                console.say(f"baguarun: rank {slot.rank} of {slot.size}: host {slot.hostname}, local rank "
                            f"{slot.local_rank} of {slot.local_size}, cross rank {slot.cross_rank} of "
                            f"{slot.cross_size}")
        outcome = Supervisor(console).run(tasks)
    if outcome.signum is not None:
        raise Interrupted(outcome.signum)
    if outcome.failed is not None:
        raise WorkerFailed(outcome.failed, outcome.exit_codes[outcome.failed])


def _forwarders(console, slot, output):
    """The LineForwarders of a rank's stdout and stderr, with files `rank.<rank>/stdout` and `stderr` when asked for."""
    streams = ("stdout", "stderr")
    files = [None, None]
    if output.directory is not None:
        # Zero-padded, so that a listing is in the order of the ranks.
        folder = os.path.join(output.directory, f"rank.{slot.rank:0{len(str(slot.size - 1))}}")
        os.makedirs(folder, exist_ok=True)
        files = [open(os.path.join(folder, stream), "wb") for stream in streams]
    return [LineForwarder(console, slot.rank, stream, output.timestamp, file)
            for stream, file in zip(streams, files, strict=True)]
