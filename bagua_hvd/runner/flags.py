"""The flags of baguarun: one table that defines the parser, the config file, the ranks' variables, --help and the page.

A flag that was not given is None, so a config file can provide its value (common/util/config_parser.py).
"""
import argparse
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.core.variables import LOG_LEVELS, MIB, TEXT, Kind, choice, integer, names, number
from bagua_hvd.core.version import __version__

USAGE_ERROR = 2
SWITCH = Kind("true or false", lambda text: {"True": True, "False": False}[text])


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        spellings: all of them, separated by spaces. off: for a switch, the spellings of the opposite.
        kind: of its value; SWITCH: it has no value. metavar: the value in --help.
        help: its meaning, without the default; "": its variable has no effect, and says why.
        default: in words; "": that of the variable, if it has one.
        variable: environment variable that it sets for the ranks. key: in the config file. After a "!", either has the
            opposite meaning. unit: factor applied to the value for the variable.
        dest: the attribute of the parsed arguments; "": derived from the first spelling with two dashes.
        rivals: name of a group of mutually exclusive flags. more: other arguments of argparse's add_argument.
    """

    spellings: str
    help: str
    kind: Kind = SWITCH
    metavar: str = ""
    variable: str = ""
    key: str = ""
    default: str = ""
    off: str = ""
    unit: int = 1
    dest: str = ""
    rivals: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The spelling in messages."""
        return next(name for name in self.spellings.split() if name.startswith("--"))

    @property
    def attribute(self) -> str:
        """Its attribute in the parsed arguments."""
        return self.dest or self.name[2:].replace("-", "_")

    @property
    def shown_default(self) -> str:
        """The default in readable form; "" if there is none."""
        variable = variables.TABLE.get(self.variable)
        return self.default or (variable.shown_default if variable and self.kind is not SWITCH else "")

    @property
    def explained(self) -> str:
        """The help including the default."""
        said = self.help or variables.TABLE[self.variable].without_effect
        return said + (f"; default {self.shown_default}" if self.shown_default else "")

    def parse(self, text: str) -> Any:
        """Parses text. ValueError: invalid; the message says what is expected."""
        try:
            return self.kind.parse(text)
        except (ValueError, KeyError):
            raise ValueError(f"{text!r}: expected {self.kind.expected}") from None

    def add_to(self, group: Any) -> None:
        """Adds it to a parser, or to an argument group."""
        settings: dict[str, Any] = {"dest": self.attribute, "default": None, "help": self.explained, **self.more}
        if self.kind is not SWITCH:
            metavar = tuple(self.metavar.split()) if "nargs" in self.more else self.metavar
            group.add_argument(*self.spellings.split(), type=self._of_the_command_line, metavar=metavar, **settings)
            return
        if self.off:
            group = group.add_mutually_exclusive_group()
            group.add_argument(*self.off.split(), **{**settings, "action": "store_false", "help":
                               f"the opposite of {self.name}, whatever the config file says"})
        group.add_argument(*self.spellings.split(), action="store_true", **settings)

    def _of_the_command_line(self, text):
        try:
            return self.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None


COUNT = integer(1)
# By headings, in the order of --help.
SECTIONS: dict[str, tuple[Flag, ...]] = {
    "job": (
        Flag("-np --num-proc", "number of processes", COUNT, "N"),
        Flag("-cb --check-build", "show what this installation can do"),
        Flag("--dry-run", "show what would run where, and start nothing"),
        Flag("--verbose", "show the plan of the job"),
        Flag("--dashboard", "a live table of the ranks on the terminal: steps/s, waiting, bytes, stalled tensors"),
        Flag("--config-file", "YAML; flags given here win over it", TEXT, "FILE"),
        Flag("--start-timeout", "seconds to reach all hosts, and then until all ranks must have called init()", COUNT,
             "S", "HOROVOD_START_TIMEOUT"),
        Flag("--grace-seconds", "seconds that the other processes have to end by themselves when one has failed; then "
             "SIGTERM, and after 5 more SIGKILL", number(0), "S", "BAGUA_HVD_GRACE_SECONDS"),
        Flag("--output-filename", "also write `DIR/rank.<rank>/stdout` and `stderr`, the unchanged output of each rank",
             TEXT, "DIR"),
        Flag("-prefix-timestamp --prefix-output-with-timestamp", "local time in front of each line"),
        Flag("--as-horovod", "`import horovod` gives bagua_hvd in every Python of the job: for scripts left unchanged"),
    ),
    "hosts": (
        Flag("-H --hosts", "hosts and slots; other hosts are reached by ssh", TEXT, "HOST:SLOTS,...",
             default="localhost:N", rivals="hosts"),
        Flag("-hostfile --hostfile", "the same, in lines `name slots=N`", TEXT, "FILE", rivals="hosts"),
        Flag("--host-discovery-script", "executable that prints lines `name:slots`; makes the job elastic", TEXT,
             "FILE", rivals="hosts"),
        Flag("-p --ssh-port", "port of sshd on all hosts", integer(1, 65535), "PORT"),
        Flag("-i --ssh-identity-file", "private key", TEXT, "FILE"),
        Flag("--network-interfaces", "allowed interfaces", names("network interfaces"), "A,B",
             default="found by trying", rivals="nics"),
        Flag("--network-interface", "one allowed interface; may be repeated", names("network interfaces"), "A",
             dest="nic", rivals="nics", more={"action": "append"}),
        Flag("--exclude-env", "environment variables not sent to other hosts; * matches any text",
             names("environment variables"), "A,B*", "BAGUA_HVD_EXCLUDE_ENV"),
        Flag("--disable-cache", "no effect: hosts are checked at every start"),
        Flag("--gloo", "the default: baguarun starts the ranks itself", dest="use_gloo", rivals="controller"),
        Flag("--mpi", "mpirun starts the ranks", dest="use_mpi", rivals="controller"),
        Flag("--jsrun", "not supported", dest="use_jsrun", rivals="controller"),
        Flag("--mpi-args", "for mpirun: `--mpi-args=\"--map-by node\"`", TEXT, "ARGS"),
        Flag("--binding-args", "for mpirun", TEXT, "ARGS", default="no binding"),
    ),
    "elastic jobs": (
        Flag("--min-np --min-num-proc", "minimum number of processes; makes the job elastic", COUNT, "N",
             dest="min_num_proc"),
        Flag("--max-np --max-num-proc", "maximum number of processes", COUNT, "N", dest="max_num_proc",
             default="all slots"),
        Flag("--slots-per-host", "slots of hosts for which the discovery script prints no number", COUNT, "N",
             dest="slots"),
        Flag("--elastic-timeout", "seconds to wait for slots after a change", COUNT, "S", "HOROVOD_ELASTIC_TIMEOUT"),
        Flag("--reset-limit", "end the job after more than this many changes of the hosts or workers", integer(0), "N"),
        Flag("--blacklist-cooldown-range", "seconds until a host that failed is used again", integer(1, 3600),
             "MIN MAX", dest="cooldown_range", default="never", more={"nargs": 2}),
    ),
    "communication": (
        Flag("--algorithm", "BAGUA algorithm, such as bytegrad, of optimizers that do not name one", TEXT, "NAME",
             "BAGUA_ALGORITHM", "params.algorithm"),
        Flag("--fusion-threshold-mb", "maximum MiB of small operations fused into one; 0: no fusion",
             integer(0, 2**43 - 1), "MB", "HOROVOD_FUSION_THRESHOLD", "params.fusion_threshold_mb", default="128",
             unit=MIB),
        Flag("--cycle-time-ms", "", number(0), "MS", "HOROVOD_CYCLE_TIME", "params.cycle_time_ms"),
        Flag("--cache-capacity", "response cache entries; 0: none", integer(0), "N", "HOROVOD_CACHE_CAPACITY",
             "params.cache_capacity"),
        Flag("--hierarchical-allreduce", "tensors on GPUs: NCCL within hosts only; without GPUs always done where "
             "hosts hold several ranks", variable="HOROVOD_HIERARCHICAL_ALLREDUCE", key="params.hierarchical_allreduce",
             off="--no-hierarchical-allreduce"),
        Flag("--hierarchical-allgather", "", variable="HOROVOD_HIERARCHICAL_ALLGATHER",
             key="params.hierarchical_allgather", off="--no-hierarchical-allgather"),
        Flag("--torus-allreduce", "", variable="HOROVOD_TORUS_ALLREDUCE",
             key="params.torus_allreduce", off="--no-torus-allreduce"),
        Flag("--gloo-timeout-seconds", "longest time in seconds without progress in an operation", COUNT, "S",
             "HOROVOD_GLOO_TIMEOUT_SECONDS", "library_options.gloo_timeout_seconds"),
        Flag("--tcp", "no InfiniBand for NCCL", variable="NCCL_IB_DISABLE", dest="tcp_flag"),
        Flag("--num-nccl-streams", "", COUNT, "N", "HOROVOD_NUM_NCCL_STREAMS",
             "library_options.num_nccl_streams"),
        Flag("--thread-affinity", "", TEXT, "CORES", "HOROVOD_THREAD_AFFINITY",
             "library_options.thread_affinity"),
        Flag("--mpi-threads-disable", "", variable="HOROVOD_MPI_THREADS_DISABLE",
             key="library_options.mpi_threads_disable", off="--no-mpi-threads-disable"),
    ),
    "autotuning": (
        Flag("--autotune", "optimizers without an algorithm use auto, which tunes the bucket size",
             variable="HOROVOD_AUTOTUNE", key="autotune.enabled",
             off="--no-autotune"),
        Flag("--autotune-log-file", "file for auto's measurements, in Horovod's CSV format", TEXT, "FILE",
             "HOROVOD_AUTOTUNE_LOG", "autotune.log_file"),
        Flag("--autotune-warmup-samples", "windows before it measures anything", integer(0), "N",
             "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "autotune.warmup_samples"),
        Flag("--autotune-steps-per-sample", "training steps in a window", COUNT, "N",
             "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "autotune.steps_per_sample"),
        Flag("--autotune-bayes-opt-max-samples", "windows after which auto keeps its choice", COUNT, "N",
             "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "autotune.bayes_opt_max_samples"),
        Flag("--autotune-gaussian-process-noise", "", number(0, 1), "X",
             "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "autotune.gaussian_process_noise"),
        Flag("--auto-log", "file for auto's measurements and choice in each window, as JSON lines", TEXT, "FILE",
             "BAGUA_AUTO_LOG", "autotune.auto_log"),
    ),
    "recording": (
        Flag("--timeline-filename", "Chrome trace of rank 0", TEXT, "FILE", "HOROVOD_TIMELINE", "timeline.filename"),
        Flag("--timeline-mark-cycles", "mark each response of the coordinator", variable="HOROVOD_TIMELINE_MARK_CYCLES",
             key="timeline.mark_cycles", off="--no-timeline-mark-cycles"),
        Flag("--log-level", "level of the ranks' logger `bagua_hvd`: " + ", ".join(LOG_LEVELS), choice(*LOG_LEVELS),
             "LEVEL", "HOROVOD_LOG_LEVEL", "logging.level"),
        Flag("--log-with-timestamp --no-log-hide-timestamp", "time in its lines, the default",
             variable="!HOROVOD_LOG_HIDE_TIME", key="logging.with_timestamp",
             off="--log-without-timestamp --log-hide-timestamp"),
        Flag("--no-stall-check", "no warning about tensors that some ranks never submit",
             variable="HOROVOD_STALL_CHECK_DISABLE", key="!stall_check.enabled", off="--stall-check"),
        Flag("--stall-check-warning-time-seconds", "seconds until that warning", integer(0), "S",
             "HOROVOD_STALL_CHECK_TIME_SECONDS", "stall_check.warning_time_seconds"),
        Flag("--stall-check-shutdown-time-seconds", "seconds until a stalled operation ends the job; 0: never",
             integer(0), "S", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "stall_check.shutdown_time_seconds"),
    ),
}

TABLE = {flag.attribute: flag for flags in SECTIONS.values() for flag in flags}


class _Parser(argparse.ArgumentParser):
    """Prints one sentence instead of the whole usage."""

    def error(self, message):
        unknown = re.match("unrecognized arguments: ([^ =]+)", message)
        near = unknown and difflib.get_close_matches(unknown[1], self._option_string_actions, 1, 0.8)
        if near:
            message += f". Did you mean {near[0]}?"
        self.exit(USAGE_ERROR, f"baguarun: error: {message} (see `baguarun --help`)\n")


def build_parser() -> argparse.ArgumentParser:
    """The argparse parser. A wrong command line ends the process with exit code 2 and one sentence."""
    parser = _Parser(
        prog="baguarun", allow_abbrev=False, usage="baguarun -np N [flags] command...",
        description="Runs a command as the N ranks of a job. Example: baguarun -np 4 python train.py")
    parser.add_argument("-v", "--version", action="version", version=__version__)
    parser.add_argument("--help-environment", action="version", version=variables.markdown(),
                        help="show all environment variables, as docs/environment.md does")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    for heading, flags in SECTIONS.items():
        section = parser.add_argument_group(heading)
        rivals: dict[str, Any] = {"": section}
        for flag in flags:
            if flag.rivals not in rivals:
                rivals[flag.rivals] = section.add_mutually_exclusive_group()
            flag.add_to(rivals[flag.rivals])
    return parser
