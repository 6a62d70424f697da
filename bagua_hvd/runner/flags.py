"""The flags of baguarun. Each that was not given is None, so that a config file can stand in for it."""
import argparse

from bagua_hvd.core import variables
from bagua_hvd.core.version import __version__
from bagua_hvd.runner.common.util import config_parser

USAGE_ERROR = 2


class _Parser(argparse.ArgumentParser):
    """One sentence instead of the whole usage."""

    def error(self, message):
        self.exit(USAGE_ERROR, f"baguarun: error: {message} (see `baguarun --help`)\n")


def _num_proc(text):
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes: give an integer from 1 on")
    return value


def _number(kind, description):
    def parse(text):
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {description}") from None

    return parse


_integer = _number(int, "an integer")
_decimal = _number(float, "a number")


def _port(text):
    value = int(text) if text.isdigit() else 0
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give an integer from 1 to 65535")
    return value


def _log_level(text):
    if text.upper() not in config_parser.LOG_LEVELS:
        levels = ", ".join(config_parser.LOG_LEVELS)
        raise argparse.ArgumentTypeError(f"{text!r} is not a log level: give one of {levels}")
    return text.upper()


def _names(text):
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no network interface: give names such as eth0,eth1")
    return names


def _switch(group, on, off, help):
    """A pair of flags: True, False; None without either."""
    dest = on[0].lstrip("-").replace("-", "_")
    switch = group.add_mutually_exclusive_group()
    switch.add_argument(*on, dest=dest, action="store_true", default=None, help=help)
    switch.add_argument(*off, dest=dest, action="store_false", default=None,
                        help=f"the opposite of {on[0]}, whatever the config file says")


def build_parser():
    """The argparse parser. A wrong command line ends the process with 2 and one sentence."""
    parser = _Parser(
        prog="baguarun", allow_abbrev=False, usage="baguarun -np N [flags] command...",
        description="Runs a command as the N ranks of a job. Example: baguarun -np 4 python train.py")
    parser.add_argument("-v", "--version", action="version", version=__version__)
    parser.add_argument("--help-environment", action="version", version=variables.markdown(),
                        help="show all environment variables, as docs/environment.md does")
    parser.add_argument("-np", "--num-proc", dest="num_proc", type=_num_proc, metavar="N", help="number of processes")
    parser.add_argument("-cb", "--check-build", action="store_true", help="show what this installation can do")
    parser.add_argument("--dry-run", action="store_true", help="show what would run where, and start nothing")
    parser.add_argument("--verbose", action="store_true", help="show the plan of the job")
    parser.add_argument("--dashboard", action="store_true", default=None,
                        help="a live table of the ranks on the terminal: steps/s, waiting, bytes, stalled tensors")
    parser.add_argument("--config-file", metavar="FILE", help="YAML; flags given here win over it")
    parser.add_argument("--start-timeout", type=_integer, metavar="S",
                        help="seconds to reach all hosts, and then until all ranks must have called init(); default "
                             "30, or HOROVOD_START_TIMEOUT")
    parser.add_argument("--grace-seconds", type=_decimal, metavar="S",
                        help="seconds that the other processes have to end by themselves when one has failed; default "
                             "5, or BAGUA_HVD_GRACE_SECONDS; then SIGTERM, and after 5 more SIGKILL")
    parser.add_argument("--output-filename", metavar="DIR",
                        help="also write DIR/rank.<rank>/stdout and stderr, the unchanged output of each rank")
    parser.add_argument("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
                        help="local time in front of each line")
    parser.add_argument("--as-horovod", action="store_true",
                        help="`import horovod` gives bagua_hvd in every Python of the job: for scripts left unchanged")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    _add_hosts(parser.add_argument_group("where"))
    _add_elastic(parser.add_argument_group("jobs that grow and shrink"))
    _add_communication(parser.add_argument_group("how the ranks communicate"))
    _add_autotune(parser.add_argument_group("search for parameters"))
    _add_records(parser.add_argument_group("what is recorded"))
    return parser


def _add_hosts(group):
    hosts = group.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="default localhost:N; others are reached by ssh")
    hosts.add_argument("-hostfile", "--hostfile", metavar="FILE", help="the same, in lines `name slots=N`")
    hosts.add_argument("--host-discovery-script", metavar="FILE",
                       help="executable that prints lines `name:slots`; makes the job elastic")
    group.add_argument("-p", "--ssh-port", type=_port, metavar="PORT", help="of sshd on all hosts")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="private key")
    nics = group.add_mutually_exclusive_group()
    nics.add_argument("--network-interfaces", type=_names, metavar="A,B",
                      help="allowed interfaces; default: found by trying")
    nics.add_argument("--network-interface", dest="nic", type=_names, action="append", metavar="A",
                      help="one of them; may be repeated")
    group.add_argument("--disable-cache", action="store_true", default=None,
                       help="no effect: hosts are checked at every start")
    controller = group.add_mutually_exclusive_group()
    controller.add_argument("--gloo", dest="use_gloo", action="store_true", default=None,
                            help="the default: baguarun starts the ranks itself")
    controller.add_argument("--mpi", dest="use_mpi", action="store_true", default=None, help="mpirun starts the ranks")
    controller.add_argument("--jsrun", dest="use_jsrun", action="store_true", default=None, help="not supported")
    group.add_argument("--mpi-args", metavar="ARGS", help="for mpirun: `--mpi-args=\"--map-by node\"`")
    group.add_argument("--binding-args", metavar="ARGS", help="for mpirun; default: no binding")


def _add_elastic(group):
    group.add_argument("--min-np", "--min-num-proc", dest="min_num_proc", type=_num_proc, metavar="N",
                       help="go on with so many processes at least; makes the job elastic")
    group.add_argument("--max-np", "--max-num-proc", dest="max_num_proc", type=_num_proc, metavar="N",
                       help="use so many at most; default: all slots")
    group.add_argument("--slots-per-host", dest="slots", type=_num_proc, metavar="N",
                       help="of hosts for which the discovery script prints none")
    group.add_argument("--elastic-timeout", type=_integer, metavar="S",
                       help="seconds to wait for slots after a change; default 600, or HOROVOD_ELASTIC_TIMEOUT")
    group.add_argument("--reset-limit", type=_integer, metavar="N", help="give up after so many changes")
    group.add_argument("--blacklist-cooldown-range", dest="cooldown_range", type=_integer, nargs=2,
                       metavar=("MIN", "MAX"), help="seconds until a host that failed is used again; default: never")


def _add_communication(group):
    group.add_argument("--algorithm", metavar="NAME",
                       help="BAGUA algorithm for optimizers that name none, such as bytegrad")
    group.add_argument("--fusion-threshold-mb", type=_integer, metavar="MB",
                       help="fusion buffer; 0: no fusion; default 128")
    group.add_argument("--cycle-time-ms", type=_decimal, metavar="MS",
                       help="no effect: there is no cycle")
    group.add_argument("--cache-capacity", type=_integer, metavar="N",
                       help="response cache entries; 0: none; default 1024")
    _switch(group, ["--hierarchical-allreduce"], ["--no-hierarchical-allreduce"],
            "tensors on GPUs: NCCL within hosts only; without GPUs always done where hosts hold several ranks")
    _switch(group, ["--hierarchical-allgather"], ["--no-hierarchical-allgather"],
            "no effect: done where hosts hold several ranks")
    _switch(group, ["--torus-allreduce"], ["--no-torus-allreduce"], "no effect")
    group.add_argument("--gloo-timeout-seconds", type=_integer, metavar="S",
                       help="longest time without progress in an operation; default 30")
    group.add_argument("--tcp", dest="tcp_flag", action="store_true", default=None, help="no InfiniBand for NCCL")
    group.add_argument("--num-nccl-streams", type=_integer, metavar="N", help="no effect")
    group.add_argument("--thread-affinity", metavar="CORES", help="no effect")
    _switch(group, ["--mpi-threads-disable"], ["--no-mpi-threads-disable"], "no effect")


def _add_autotune(group):
    _switch(group, ["--autotune"], ["--no-autotune"], "no effect: nothing is searched for")
    group.add_argument("--autotune-log-file", metavar="FILE", help="no effect, as the next ones")
    group.add_argument("--autotune-warmup-samples", type=_integer, metavar="N", help="default 3")
    group.add_argument("--autotune-steps-per-sample", type=_integer, metavar="N", help="default 10")
    group.add_argument("--autotune-bayes-opt-max-samples", type=_integer, metavar="N", help="default 20")
    group.add_argument("--autotune-gaussian-process-noise", type=_decimal, metavar="X", help="0 to 1; default 0.8")


def _add_records(group):
    group.add_argument("--timeline-filename", metavar="FILE", help="Chrome trace of rank 0")
    _switch(group, ["--timeline-mark-cycles"], ["--no-timeline-mark-cycles"], "marks where the coordinator answers")
    group.add_argument("--log-level", type=_log_level, metavar="LEVEL",
                       help="no effect but on scripts that look; " + ", ".join(config_parser.LOG_LEVELS))
    _switch(group, ["--log-with-timestamp", "--no-log-hide-timestamp"], ["--log-without-timestamp",
            "--log-hide-timestamp"], "no effect: messages carry no time")
    _switch(group, ["--no-stall-check"], ["--stall-check"], "no warning about tensors that some ranks never submit")
    group.add_argument("--stall-check-warning-time-seconds", type=_integer, metavar="S", help="default 60")
    group.add_argument("--stall-check-shutdown-time-seconds", type=_integer, metavar="S",
                       help="end the job then; 0, the default: never")
