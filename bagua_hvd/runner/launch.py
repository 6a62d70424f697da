"""The command line `baguarun -np N command...`: flags, their checks, exit codes.

Exit codes: 0, all ranks ended with 0; that of the first rank that failed, 128 + n when signal n ended it; 128 + n when
signal n stopped baguarun; 2, a wrong command line; 1, the job could not be started. Every failure is a sentence on
stderr.
"""
import argparse
import errno
import os
import shutil
import sys

import bagua_hvd
from bagua_hvd.runner.common.util import config_parser
from bagua_hvd.runner.local import (
    Interrupted,
    OutputOptions,
    WorkerFailed,
    as_horovod_environment,
    plan_local,
    run_local,
)

_USAGE_ERROR, _START_ERROR = 2, 1


class UsageError(ValueError):
    """The command line is wrong; the sentence says how to put it right."""


class _Parser(argparse.ArgumentParser):
    """One sentence instead of the whole usage."""

    def error(self, message):
        self.exit(_USAGE_ERROR, f"baguarun: error: {message} (see `baguarun --help`)\n")


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


def _log_level(text):
    if text.upper() not in config_parser.LOG_LEVELS:
        levels = ", ".join(config_parser.LOG_LEVELS)
        raise argparse.ArgumentTypeError(f"{text!r} is not a log level: give one of {levels}")
    return text.upper()


def _build_parser():
    parser = _Parser(
        prog="baguarun", allow_abbrev=False, usage="baguarun -np N [flags] command...",
        description="Runs a command as the N ranks of a job. Example: baguarun -np 4 python train.py")
    parser.add_argument("-v", "--version", action="version", version=bagua_hvd.__version__)
    parser.add_argument("-np", "--num-proc", dest="num_proc", type=_num_proc, metavar="N", help="number of processes")
    parser.add_argument("-cb", "--check-build", action="store_true", help="show what this installation can do")
    parser.add_argument("--verbose", action="store_true", help="show the plan of the job")
    parser.add_argument("--start-timeout", type=_integer, metavar="S",
                        help="seconds until all ranks must have called init(); default 30, or HOROVOD_START_TIMEOUT")
    parser.add_argument("--output-filename", metavar="DIR",
                        help="also write DIR/rank.<rank>/stdout and stderr, the unchanged output of each rank")
    parser.add_argument("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
                        help="local time in front of each line")
    parser.add_argument("--as-horovod", action="store_true",
                        help="`import horovod` gives bagua_hvd in every Python of the job: for scripts left unchanged")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, with its arguments")

    group = parser.add_argument_group("where")
    group.add_argument("-H", "--hosts", metavar="HOST:SLOTS", help="default localhost:N; this version: this host only")
    group.add_argument("--gloo", action="store_true", help="accepted for Horovod's sake: the built-in transports")

    group = parser.add_argument_group("how the ranks communicate")
    group.add_argument("--algorithm", metavar="NAME",
                       help="BAGUA algorithm for optimizers that name none, such as bytegrad")
    group.add_argument("--fusion-threshold-mb", type=_integer, metavar="MB",
                       help="fusion buffer; 0: no fusion; default 128")
    group.add_argument("--cycle-time-ms", type=_decimal, metavar="MS",
                       help="longest wait for further tensors; default 1")
    group.add_argument("--cache-capacity", type=_integer, metavar="N",
                       help="response cache entries; 0: none; default 1024")
    group.add_argument("--gloo-timeout-seconds", type=_integer, metavar="S",
                       help="longest time without progress in an operation; default 30")

    group = parser.add_argument_group("what is recorded")
    group.add_argument("--timeline-filename", metavar="FILE", help="Chrome trace of rank 0")
    group.add_argument("--log-level", type=_log_level, metavar="LEVEL", help=", ".join(config_parser.LOG_LEVELS))
    switch = group.add_mutually_exclusive_group()
    switch.add_argument("--no-stall-check", dest="no_stall_check", action="store_true", default=None,
                        help="no warning about tensors that some ranks never submit")
    switch.add_argument("--stall-check", dest="no_stall_check", action="store_false", help="the default")
    group.add_argument("--stall-check-warning-time-seconds", type=_integer, metavar="S", help="default 60")
    group.add_argument("--stall-check-shutdown-time-seconds", type=_integer, metavar="S",
                       help="end the job then; 0, the default: never")
    return parser


def parse_args():
    """The arguments in sys.argv, checked as far as they can be by themselves. Wrong ones end the process with 2."""
    parser = _build_parser()
    args = parser.parse_args()
    if args.command[:1] == ["--"]:
        del args.command[0]
    if not args.check_build:
        if args.num_proc is None:
            parser.error("-np is missing: say how many processes to start, such as `baguarun -np 2 python train.py`")
        if not args.command:
            parser.error("the command is missing: say what to run, such as `baguarun -np 2 python train.py`")
    try:
        config_parser.validate_config_args(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _check_command(name, env):
    """FileNotFoundError or PermissionError, with a sentence, unless the command can be run."""
    if shutil.which(name, path=env.get("PATH", os.defpath)):
        return
    python = f"; for a Python script, run `python {name}`" if name.endswith(".py") else ""
    if os.path.isdir(name):
        raise PermissionError(f"{name!r} is a directory: name a command to run")
    if os.path.dirname(name) and os.path.exists(name):
        raise PermissionError(f"{name!r} is not executable: run `chmod +x {name}`{python}")
    where = "no such file" if os.path.dirname(name) else "not found in PATH"
    raise FileNotFoundError(f"command {name!r}: {where}; check its spelling{python}")


def _plan(args):
    """SlotInfos for args.num_proc ranks. UsageError: malformed hosts, too few slots, or a host that is not this one."""
    try:
        return plan_local(args.num_proc, args.hosts)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from None


def _run_static(args):
    """Runs a job of fixed size; see _run."""
    env = config_parser.set_env_from_args(dict(os.environ), args)
    if args.as_horovod:
        env = as_horovod_environment(env)
    slots = _plan(args)
    _check_command(args.command[0], env)
    output = OutputOptions(args.output_filename, args.prefix_output_with_timestamp)
    run_local(args.command, slots, env, output, args.verbose)


def _run(args):
    """Runs what parse_args() understood; returns when all ranks ended with 0.

    Raises:
        UsageError: the arguments do not fit together. WorkerFailed, Interrupted, RuntimeError, OSError: as run_local.
    """
    if args.check_build:
        from bagua_hvd.runner.check_build import check_build

        print(check_build())
        return
    _run_static(args)


def _describe(error):
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return f"{error.strerror}: every rank needs three descriptors; raise the limit, such as `ulimit -n 65536`"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


def _open_standard_descriptors():
    """Opens /dev/null for those of 0, 1, 2 that are closed (`>&-`): else a socket of ours could become one of them."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def run_commandline():
    """The console script. Ends the process with an exit code of the module's list."""
    _open_standard_descriptors()
    try:
        _run(parse_args())
    except UsageError as error:
        _fail(f"baguarun: error: {error} (see `baguarun --help`)", _USAGE_ERROR)
    except WorkerFailed as error:
        _fail(f"baguarun: {error}", error.exit_code)
    except Interrupted as error:
        _fail(f"baguarun: {error}; all processes of the job have ended.", 128 + error.signum)
    except KeyboardInterrupt:
        _fail("baguarun: stopped by SIGINT before the job began.", 130)
    except (RuntimeError, OSError) as error:
        _fail(f"baguarun: error: {_describe(error)}", _START_ERROR)


def _fail(sentence, exit_code):
    try:
        print(sentence, file=sys.stderr, flush=True)
    except OSError:
        pass        # nobody reads stderr; the code still tells
    sys.exit(exit_code)


if __name__ == "__main__":
    run_commandline()
