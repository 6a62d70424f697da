"""Every environment variable that bagua_hvd reads, its own and Horovod's: its meaning, and how its text is parsed.

`read()` knows no others; docs/environment.md and `baguarun --help-environment` are made from this table.
Variables of other engines (mpirun, srun, torchrun) are read in job/engines.py, where the engines are detected.
"""
import base64
import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

MIB = 1 << 20
_NEAR = 0.88        # ratio of difflib: a typo of one or two letters
LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True)
class Kind:
    """How a text becomes a value. convert raises ValueError for some invalid text.

    expected: describes valid text, in errors; brief: in docs/environment.md, "": the same.
    """

    expected: str
    convert: Callable[[str], Any]
    valid: Callable[[Any], bool] = lambda value: True
    secret: bool = False        # the text stays out of errors
    brief: str = ""

    def parse(self, text: str) -> Any:
        """The value. ValueError: the text is invalid."""
        value = self.convert(text)
        if not self.valid(value):
            raise ValueError
        return value


def integer(low: int, high: int = 2**31 - 1) -> Kind:
    """A whole number within limits."""
    more, limits = f"{low} or more", f"{low} to {high}"
    return Kind(f"an integer, {more}" if high == 2**63 - 1 else f"an integer from {limits}", int,
                lambda value: low <= value <= high, brief=f"integer, {more if high >= 2**31 - 1 else limits}")


def number(low: float, high: float = math.inf) -> Kind:
    """A finite number within limits: an int if the text is an integer, else a float."""
    return Kind(f"a number, {low:g} or more" if high == math.inf else f"a number from {low:g} to {high:g}",
                lambda text: int(text) if text.lstrip("+-").isdigit() else float(text),
                lambda value: low <= value <= high and math.isfinite(value))


def names(of: str) -> Kind:
    """Names separated by commas: a list of at least one."""
    return Kind(f"comma-separated {of}", lambda text: [name.strip() for name in text.split(",") if name.strip()], bool)


def seconds(allow_zero: bool = False) -> Kind:
    """A time in seconds, fractions allowed; a float."""
    least = 0 if allow_zero else 0.001
    limits = "seconds, " + ("0 or more" if allow_zero else "more than 0")
    return Kind(f"a time in {limits}", float, lambda value: least <= value <= 2_000_000, brief=limits)  # NaN fails, too


def choice(*choices: str) -> Kind:
    """One of some words, regardless of case."""
    by_lower = {word.lower(): word for word in choices}
    words = ", ".join(choices)
    return Kind(f"one of {words}", lambda text: by_lower.get(text.lower()), bool, brief=words)


def _ports(text):
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


TEXT = Kind("text", str)
FLAG = Kind("0 or 1", lambda text: int(text) > 0)
NUMBER = Kind("a number", float, math.isfinite)
PORTS = Kind("a port, or a range such as 20000-20100", _ports,
             lambda ports: bool(ports) and ports[0] >= 1 and ports[-1] <= 65535)
SECRET = Kind("base64 text", lambda text: base64.b64decode(text, validate=True), secret=True)


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name, kind. default: the value if it is missing or empty; None: it depends, as the meaning says.
        meaning: a sentence for users; a default that depends follows as "Default: ...", at the end.
        setter: "user"; "baguarun": baguarun sets it for its ranks; "scripts": baguarun sets it, but only scripts read
            it; "none": accepted for compatibility with Horovod, without effect; setting it logs a warning.
    """

    name: str
    kind: Kind
    default: Any
    meaning: str
    setter: str = "user"

    @property
    def shown_default(self) -> str:
        """The default in readable form; "" if there is none."""
        value = self.default
        if value is None or self.setter == "none":
            return ""
        if value == range(1):
            return "any"
        if isinstance(value, int) and value >= MIB and value % MIB == 0:
            return f"{value} ({value // MIB} MiB)"
        if isinstance(value, (bool, float)):
            return f"{value:g}"
        return str(value or "")

    @property
    def without_effect(self) -> str:
        """For a variable without effect: a sentence that says so, and why."""
        why = self.meaning.rstrip(".")
        return "no effect: " + (why[0].lower() + why[1:] if why[1].islower() else why)

    def read(self, environ: Mapping[str, str] | None = None) -> Any:
        """Its value in the environment, or in another mapping.

        Raises:
            ValueError: the text is invalid; the message says what is expected.
        """
        text = (os.environ if environ is None else environ).get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.kind.parse(text)
        except ValueError:
            shown = "" if self.kind.secret else f"={text!r}"
            raise ValueError(f"environment variable {self.name}{shown}: expected {self.kind.expected}") from None


def _launcher(name, kind, default, meaning):
    return Variable(name, kind, default, meaning, "baguarun")


def _ignored(name, kind, meaning):
    return Variable(name, kind, None, meaning, "none")


# By headings, in the order of docs/environment.md.
SECTIONS: dict[str, tuple[Variable, ...]] = {
    "Training": (
        Variable("BAGUA_ALGORITHM", TEXT, "gradient_allreduce",
                 "Algorithm of optimizers that do not name one; see docs/choose.md."),
        Variable("HOROVOD_AUTOTUNE", FLAG, False,
                 "1: optimizers without an algorithm use auto instead of gradient_allreduce; it tunes the bucket "
                 "size."),
        Variable("HOROVOD_AUTOTUNE_LOG", TEXT, None,
                 "File in which rank 0 writes auto's measurements, in Horovod's CSV format. BAGUA_AUTO_LOG has more."),
        Variable("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", integer(0), None,
                 "Windows of steps that auto skips before it measures. Default: 0."),
        Variable("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", integer(1), None, "Steps in a window of auto. Default: 25."),
        Variable("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", integer(1), None,
                 "Windows after which auto keeps its choice. Default: no limit."),
        Variable("BAGUA_AUTO_LOG", TEXT, None,
                 "File in which rank 0 writes a JSON line for each window: auto's measurements, predictions and "
                 "choice."),
        Variable("BAGUA_DEFAULT_BUCKET_SIZE", integer(1, 2**63 - 1), 10 * MIB,
                 "Bytes of gradients in one bucket."),
        Variable("BAGUA_FULL_STEPS", integer(0), 64,
                 "Full steps, in which most algorithms average all gradients: this many first, then as many at "
                 "intervals of 2, of 4, ... 0: none, as in the algorithms' papers."),
        Variable("BAGUA_FULL_STEP_BITS", choice("8", "32"), None,
                 "Bits per element in full steps and warm-ups; 32: full precision. Default: 8; 32 if all ranks are on "
                 "one host."),
        Variable("BAGUA_OVERLAP", FLAG, True,
                 "0: optimizers begin to communicate only when the backward pass has ended."),
        Variable("BAGUA_FUSION", FLAG, True,
                 "0: each gradient or weight is sent by itself, in a bucket of one; HOROVOD_FUSION_THRESHOLD is 0."),
        Variable("BAGUA_HIERARCHY", FLAG, True,
                 "0: no hierarchical operations (within hosts, then between them): BAGUA_HVD_ALLREDUCE is ring by "
                 "default."),
        Variable("BAGUA_GRADIENTS_UNTOUCHED", FLAG, False,
                 "1: in torch, step() waits for the reduction of gradients, not backward(): see DistributedOptimizer."),
    ),
    "Communication": (
        Variable("BAGUA_HVD_TRANSPORT", choice("auto", "shm", "tcp", "mpi"), "auto",
                 "What moves data: auto is shared memory on a host and TCP between hosts; mpi: the MPI of mpirun."),
        Variable("BAGUA_HVD_ALLREDUCE", TEXT, None,
                 "ring, doubling or halving: allreduce by this algorithm among all ranks; no collective uses shared "
                 "memory. Default: the fastest."),
        Variable("BAGUA_HVD_STREAMS", integer(0, 8), 0,
                 "TCP data connections per pair of ranks; 0: 1, or 4 if a round trip takes 2 ms or more."),
        Variable("BAGUA_HVD_EMULATED_MBITS", integer(0), 0,
                 "Limit in Mbit/s of each of these connections, to emulate a slow network; 0: no limit."),
        Variable("BAGUA_HVD_NEGOTIATION", TEXT, None,
                 "star or tree: how ranks reach the coordinator. Default: a tree beyond 64 ranks."),
        Variable("BAGUA_HVD_NEGOTIATION_FANOUT", integer(1, 1024), 16, "Children of each rank in that tree."),
        Variable("HOROVOD_FUSION_THRESHOLD", integer(0, 2**63 - 1), 128 * MIB,
                 "Maximum bytes of small operations fused into one; 0: no fusion."),
        Variable("HOROVOD_CACHE_CAPACITY", integer(0), 1024,
                 "Response cache entries: a cached operation is negotiated in a few bytes; 0: no cache."),
        Variable("HOROVOD_DYNAMIC_PROCESS_SETS", FLAG, False,
                 "1: process sets may be added and removed after init()."),
        Variable("HOROVOD_GLOO_IFACE", names("network interfaces"), None,
                 "Interfaces to use on every host: the first with an address, IPv4 if it has one. Default: those that "
                 "baguarun finds by connecting; without baguarun, the one towards the rendezvous."),
        Variable("BAGUA_HVD_PORTS", PORTS, range(1),
                 "Ports to listen on: each listener takes the first free one. A host needs one per rank, the "
                 "launcher's host three more."),
        Variable("BAGUA_HVD_QUORUM_SERVER", TEXT, None,
                 "host:port of a server for outer steps with a quorum. Default: rank 0."),
        Variable("BAGUA_HVD_HOST_ID", TEXT, None,
                 "Identifies a host: ranks with equal text share memory. Default: detected."),
    ),
    "GPUs": (
        Variable("BAGUA_HVD_NCCL", choice("0", "1", "local"), "1",
                 "1: NCCL where each rank has a GPU of its own; local: within hosts only; 0: never."),
        Variable("HOROVOD_HIERARCHICAL_ALLREDUCE", FLAG, False,
                 "1: allreduce of tensors on GPUs uses NCCL within hosts only."),
        Variable("BAGUA_HVD_LIBCUDA", TEXT, None, "File of the driver's library. Default: libcuda.so.1."),
        Variable("BAGUA_HVD_LIBNCCL", TEXT, None,
                 "File of NCCL. Default: that of the nvidia-nccl package, or libnccl.so.2."),
    ),
    "Waiting and failure": (
        Variable("HOROVOD_START_TIMEOUT", seconds(), 30.0, "Seconds within which all ranks must have called init()."),
        Variable("HOROVOD_GLOO_TIMEOUT_SECONDS", seconds(), 30.0,
                 "Longest time without progress within an operation."),
        Variable("BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS", seconds(allow_zero=True), 30.0,
                 "A rank that sends nothing for this long is considered lost; 0: never."),
        Variable("BAGUA_HVD_GRACE_SECONDS", seconds(allow_zero=True), 5.0,
                 "Seconds that the other ranks have to end by themselves after a rank fails; then SIGTERM."),
        Variable("HOROVOD_STALL_CHECK_DISABLE", FLAG, False,
                 "1: no warning about operations that some ranks have not posted."),
        Variable("HOROVOD_STALL_CHECK_TIME_SECONDS", seconds(allow_zero=True), 60.0,
                 "Seconds until that warning; 0: none."),
        Variable("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", seconds(allow_zero=True), 0.0,
                 "Seconds until such an operation ends the job; 0: never. Ignored if below the time of the "
                 "warning."),
        Variable("HOROVOD_SPARK_START_TIMEOUT", seconds(), 600.0,
                 "bagua_hvd.spark: seconds to wait for Spark to start all ranks."),
        Variable("HOROVOD_ELASTIC_TIMEOUT", seconds(), 600.0,
                 "Elastic jobs: longest time to wait for slots after a change."),
    ),
    "Records": (
        Variable("HOROVOD_LOG_LEVEL", choice(*LOG_LEVELS), None,
                 "Level of the logger bagua_hvd. Default: WARNING, or the script's."),
        Variable("HOROVOD_LOG_HIDE_TIME", FLAG, False, "1: no time in its lines on stderr."),
        Variable("HOROVOD_TIMELINE", TEXT, None,
                 "File in which rank 0 writes the timeline, a Chrome trace; DYNAMIC: none until hvd.start_timeline()."),
        Variable("BAGUA_HVD_METRICS_PORT", integer(1, 65535), None,
                 "Port on which rank 0 serves hvd.statistics() to Prometheus. Default: not served."),
        Variable("BAGUA_HVD_METRICS_HOST", TEXT, "127.0.0.1", "The address that this server listens on."),
        Variable("HOROVOD_TIMELINE_MARK_CYCLES", FLAG, False,
                 "1: the timeline marks each response of the coordinator."),
    ),
    "Other engines": (
        Variable("BAGUA_HVD_EXCHANGE", choice("file", "mpi", "store"), None,
                 "How rank 0 sends the rendezvous address to ranks that mpirun, srun or torchrun started. Default: the "
                 "first way that works."),
        Variable("BAGUA_HVD_MPI_LIBRARY", TEXT, None, "File of the MPI library. Default: that of mpirun."),
        Variable("BAGUA_HVD_EXCLUDE_ENV", names("environment variables"), None,
                 "Variables that baguarun does not send to other hosts; * matches any text."),
        Variable("BAGUA_HVD_SSH_COMMAND", TEXT, "ssh", "The ssh command of baguarun, options included."),
    ),
    "Set by baguarun for its ranks": (
        _launcher("HOROVOD_RANK", integer(0), 0, "Number of the rank in the job."),
        _launcher("HOROVOD_SIZE", integer(1), 1, "Ranks in the job."),
        _launcher("HOROVOD_LOCAL_RANK", integer(0), 0, "Number of the rank on its host."),
        _launcher("HOROVOD_LOCAL_SIZE", integer(1), 1, "Ranks on the host."),
        _launcher("HOROVOD_CROSS_RANK", integer(0), 0, "Number of the host among those with this local rank."),
        _launcher("HOROVOD_CROSS_SIZE", integer(1), 1, "Hosts with this local rank."),
        _launcher("HOROVOD_HOSTNAME", TEXT, None, "Name of the host in the launcher's list."),
        _launcher("HOROVOD_GLOO_RENDEZVOUS_ADDR", TEXT, None, "Host of the rendezvous: a name or an address."),
        _launcher("HOROVOD_GLOO_RENDEZVOUS_PORT", integer(0, 65535), None,
                  "Its port; 0: no rendezvous, another launcher started the ranks."),
        _launcher("_HOROVOD_SECRET_KEY", SECRET, b"", "The job's secret, with which ranks authenticate."),
        _launcher("HOROVOD_ELASTIC", FLAG, False, "1: the job is elastic."),
        _launcher("BAGUA_HVD_ELASTIC_DRIVER", TEXT, None, "Where the launcher of an elastic job listens."),
        _launcher("BAGUA_HVD_ELASTIC_WORKER", TEXT, "0", "Number of the process in an elastic job."),
        _launcher("BAGUA_HVD_DASHBOARD", FLAG, False, "1: the rank reports to `baguarun --dashboard`."),
        _launcher("BAGUA_HVD_LAUNCHER_PIPE", TEXT, None,
                  "Device and inode of the pipe that baguarun reads as the rank's stderr."),
        Variable("HOROVOD_CONTROLLER", TEXT, None, "gloo, for scripts that look; another value changes nothing.",
                 "scripts"),
        Variable("HOROVOD_CPU_OPERATIONS", TEXT, None, "As HOROVOD_CONTROLLER.", "scripts"),
        _launcher("BAGUA_HVD_JOB", TEXT, None,
                  "Marks the job's processes, which baguarun ends with the job. Unset it for a process that must "
                  "outlive the job."),
    ),
    "Without effect, accepted for compatibility with Horovod": (
        _ignored("HOROVOD_CYCLE_TIME", NUMBER,
                 "There is no cycle: an operation starts when the last rank has posted it."),
        _ignored("HOROVOD_HIERARCHICAL_ALLGATHER", FLAG, "Done wherever hosts hold several ranks."),
        _ignored("HOROVOD_TORUS_ALLREDUCE", FLAG, "There is no such path."),
        _ignored("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", NUMBER, "There is no Gaussian process: auto predicts."),
        _ignored("HOROVOD_MPI_THREADS_DISABLE", FLAG, "MPI is only used by one thread."),
        _ignored("HOROVOD_NUM_NCCL_STREAMS", integer(1), "There is one for each GPU."),
        _ignored("HOROVOD_THREAD_AFFINITY", TEXT, "Threads go where the system puts them."),
    ),
}

TABLE = {variable.name: variable for variables in SECTIONS.values() for variable in variables}


def markdown() -> str:
    """The table in the form of docs/environment.md."""
    lines = ["# Environment variables", "",
             "What ranks and `baguarun` read. Flags of `baguarun` set some of them and win over what you export.",
             "`baguarun --help-environment` prints this page; it is made from bagua_hvd/core/variables.py."]
    for heading, section in SECTIONS.items():
        lines += ["", f"## {heading}", "", "| variable | value | default | meaning |", "|---|---|---|---|"]
        for each in section:
            meaning, _, default = each.meaning.partition(" Default: ")
            default = each.shown_default or default.removesuffix(".")
            lines.append(f"| `{each.name}` | {each.kind.brief or each.kind.expected} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def without_effect(environ: Mapping[str, str] | None = None) -> list[str]:
    """Sentences about variables that are set though they have no effect; flags set to 0 are left out."""
    found = []
    for variable in TABLE.values():
        text = (os.environ if environ is None else environ).get(variable.name, "").strip()
        if variable.setter == "none" and text and not (variable.kind is FLAG and text == "0"):
            found.append(f"{variable.name}={text} has {variable.without_effect}")
    return found


def misspelt() -> list[str]:
    """Sentences about variables that are not in the table but nearly spelt like one that is."""
    found = []
    for name in sorted(os.environ):
        if name.startswith(("BAGUA_", "HOROVOD_", "_HOROVOD_")) and name not in TABLE \
                and not name.startswith("HOROVOD_GPU_"):        # variables of Horovod's build
            near = [known for known in TABLE if known.startswith(name + "_")] or difflib.get_close_matches(
                name, TABLE, 1, _NEAR)
            if near:
                found.append(f"environment variable {name} is unknown and has no effect. Did you mean {near[0]}?")
    return found


def check(environ: Mapping[str, str] | None = None) -> None:
    """Reads every variable that has an effect. ValueError: the text of one is invalid; the message names it."""
    for variable in TABLE.values():
        if variable.setter != "none":
            variable.read(environ)


def given(name: str) -> bool:
    """Whether the environment sets a variable of the table."""
    return bool(os.environ.get(TABLE[name].name, "").strip())


def read(name: str, environ: Mapping[str, str] | None = None, kind: Kind | None = None) -> Any:
    """The value of a variable of the table; see Variable.read. kind: a narrower one than the table's."""
    return (TABLE[name] if kind is None else replace(TABLE[name], kind=kind)).read(environ)
