"""The command line `baguarun -np N command...`: flags, their checks, exit codes; `baguarun --check-build`.

Exit codes: 0: all ranks ended with 0; the code of the first rank that failed, 128 + n if signal n ended it; 128 + n if
signal n stopped baguarun; 2: a wrong command line; 1: the job could not be started. Every failure prints a sentence on
stderr.
"""
import errno
import importlib
import importlib.util
import os
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import contextmanager, suppress

from bagua_hvd.core import variables
from bagua_hvd.core.version import __version__
from bagua_hvd.runner import job
from bagua_hvd.runner.common.util import config_parser
from bagua_hvd.runner.common.util.hosts import is_local, parse_host_files, plan
from bagua_hvd.runner.flags import TABLE, USAGE_ERROR, build_parser

_START_ERROR = 1


def parse_args() -> Namespace:
    """Parses sys.argv, with all checks that need only the arguments. Errors end the process with exit code 2."""
    parser = build_parser()
    args = parser.parse_args()
    if args.command[:1] == ["--"]:
        del args.command[0]
    try:
        if args.config_file is not None:
            _read_config_file(args)
        config_parser.validate_config_args(args)
    except ValueError as error:
        parser.error(str(error))
    if not args.check_build:
        if args.num_proc is None and args.min_num_proc is None:
            parser.error("-np is missing: say how many processes to start, such as `baguarun -np 2 python train.py`")
        if not args.command:
            parser.error("the command is missing: say what to run, such as `baguarun -np 2 python train.py`")
    if args.use_jsrun:
        parser.error("--jsrun: jsrun is not supported; name the hosts by -H, or leave them to mpirun by --mpi")
    args.nics = args.network_interfaces or sum(args.nic or [], []) or None
    return args


def _read_config_file(args):
    """Sets arguments that only the file contains. ValueError: no file, no PyYAML, not YAML, wrong values."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise ValueError("--config-file needs PyYAML: pip install 'bagua_hvd[yaml]'") from None

    given = {name for name, value in vars(args).items() if value is not None}
    try:
        with open(args.config_file) as file:
            config = yaml.safe_load(file) or {}
        unknown = config_parser.set_args_from_config(args, config, given)
    except OSError as error:
        raise ValueError(f"--config-file {args.config_file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config-file {args.config_file} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"--config-file {args.config_file}: its lists or mappings are nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"--config-file {args.config_file}: {error}") from None
    if unknown:
        _warn(f"--config-file {args.config_file}: unknown key {', '.join(unknown)}")


def _warn(sentence):
    print(f"baguarun: warning: {sentence}", file=sys.stderr)


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


def _check_algorithm(given):
    """Raises ValueError if the package has no such algorithm. None: that of BAGUA_ALGORITHM, which the script may
    register: only warns.
    """
    try:
        from bagua_hvd import algorithms
    except ImportError:
        return      # the native extension is not built; reported where it is needed
    name = variables.read("BAGUA_ALGORITHM") if given is None else given
    if name in algorithms.names():
        return
    try:
        algorithms.get(name)
    except ValueError as error:
        if given is not None:
            raise ValueError(f"--algorithm: {error} If the script registers it, set BAGUA_ALGORITHM={name} "
                             "instead") from None
        _warn(f"BAGUA_ALGORITHM={name}: {error} Unless the script registers it, the job will fail.")


def _hosts(args):
    """`h1:2,h2:2`, from -H or the hostfile; None: not given. ValueError: no such file, or it is malformed."""
    if args.hostfile is None:
        return args.hosts
    try:
        return parse_host_files(args.hostfile)
    except OSError as error:
        raise ValueError(f"--hostfile {args.hostfile}: {error.strerror}") from None


def _environment(args):
    """The job's environment: the launcher's own, and variables set by the flags."""
    env = config_parser.set_env_from_args(dict(os.environ), args)
    return job.as_horovod_environment(env) if args.as_horovod else env


def _run_static(args):
    """Runs a job of fixed size; see _run."""
    env = _environment(args)
    slots = plan(args.num_proc, _hosts(args))
    options = job.host_options(env, args.ssh_port, args.ssh_identity_file, args.nics)
    if any(is_local(name) for name in {slot.hostname for slot in slots}):
        _check_command(args.command[0], env)
    if args.dry_run:
        for slot in slots:
            way = "here" if is_local(slot.hostname) else "by ssh"
            print(f"{job.describe(slot)}, started {way}: {shlex.join(args.command)}")
        return
    job.run_static(_job(args, env, options), slots, args.verbose)


def _job(args, env, options):
    dashboard = bool(args.dashboard)
    if dashboard and not os.isatty(1):
        _warn("--dashboard has no effect: stdout is not a terminal")
        dashboard = False
    return job.Job(args.command, env, options, args.output_filename, bool(args.prefix_output_with_timestamp),
                   dashboard=dashboard)


def _run_mpi(args):
    """Hands the job to mpirun; see _run. Returns only for --dry-run."""
    from bagua_hvd.runner import mpi_run

    if args.min_num_proc is not None or args.host_discovery_script is not None:
        raise ValueError("--mpi: mpirun starts no elastic jobs: leave out --mpi, or --min-np and "
                         "--host-discovery-script")
    env = mpi_run.environment(_environment(args))
    try:
        command = mpi_run.command(args, _hosts(args), env)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    without_effect = [TABLE[name].name for name in ("dashboard", "prefix_output_with_timestamp", "grace_seconds")
                      if getattr(args, name) is not None]
    if without_effect:
        _warn(f"with --mpi these flags have no effect: {', '.join(without_effect)}")
    if args.dry_run:
        print(shlex.join(command))
        return
    os.execvpe(command[0], command, env)


def _run_elastic(args):
    """Runs a job that grows and shrinks; see _run."""
    from bagua_hvd.runner.elastic.run import plan_elastic, run_elastic

    env = _environment(args)
    discovery, settings = plan_elastic(env, args.num_proc, args.min_num_proc, args.max_num_proc,
                                       args.host_discovery_script, args.slots, _hosts(args), args.reset_limit)
    options = job.host_options(env, args.ssh_port, args.ssh_identity_file, args.nics)
    if args.dry_run:
        for name, slots in discovery.find_available_hosts_and_slots().items():
            print(f"{name}:{slots}, up to {slots} ranks: {shlex.join(args.command)}")
        return
    run_elastic(_job(args, env, options), discovery, settings, args.cooldown_range)


def _run(args):
    """Runs the parsed arguments; returns when all ranks have ended with 0. ValueError: wrong arguments or variables."""
    if args.check_build:
        check_build(args.verbose)
        return
    if args.algorithm is not None or variables.given("BAGUA_ALGORITHM"):    # else NumPy and the core are not needed
        _check_algorithm(args.algorithm)
    if args.use_mpi:
        _run_mpi(args)
        return
    if args.mpi_args or args.binding_args:
        _warn("--mpi-args and --binding-args have no effect without --mpi")
    if args.min_num_proc is not None or args.host_discovery_script is not None:
        _run_elastic(args)
    else:
        _run_static(args)


def is_gloo_used(use_gloo: bool | None = None, use_mpi: bool | None = None, use_jsrun: bool | None = None) -> bool:
    """Whether baguarun itself starts the ranks, instead of mpirun or jsrun: unless one of them is requested."""
    return bool(use_gloo) or not (use_mpi or use_jsrun)


def run_controller(use_gloo: bool | None, gloo_run: Callable[[], object], use_mpi: bool | None,
                   mpi_run: Callable[[], object], use_jsrun: bool | None, js_run: Callable[[], object],
                   verbosity: object) -> None:
    """Calls the function that the flags choose, for launchers built on this one.

    Args:
        use_gloo, use_mpi, use_jsrun: as the flags. gloo_run, mpi_run, js_run: called without arguments.
        verbosity: accepted for compatibility with Horovod.
    Raises:
        ValueError: more than one was requested.
    """
    if sum(map(bool, (use_gloo, use_mpi, use_jsrun))) > 1:
        raise ValueError("use_gloo, use_mpi and use_jsrun exclude each other: give one of them")
    if is_gloo_used(use_gloo, use_mpi, use_jsrun):
        gloo_run()
    elif use_mpi:
        mpi_run()
    else:
        js_run()


def _describe(error):
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return f"{error.strerror}: every rank needs three descriptors; raise the limit, such as `ulimit -n 65536`"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _open_standard_descriptors():
    """Opens /dev/null for closed descriptors among 0, 1, 2 (`>&-`): else a socket could become one of them."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def run_commandline() -> None:
    """The console script. Ends the process with an exit code of the module's list."""
    _open_standard_descriptors()
    try:
        _run(parse_args())
    except ValueError as error:
        _fail(f"baguarun: error: {error} (see `baguarun --help`)", USAGE_ERROR)
    except job.WorkerFailed as error:
        _fail(f"baguarun: {error}", error.exit_code)
    except job.Interrupted as error:
        _fail(f"baguarun: {error}; all processes of the job have ended.", 128 + error.signum)
    except KeyboardInterrupt:
        _fail("baguarun: stopped by SIGINT before the job began.", 130)
    except (RuntimeError, OSError) as error:
        _fail("\n".join(f"baguarun: error: {line}" for line in _describe(error).splitlines()), _START_ERROR)


def _fail(sentence, exit_code):
    with suppress(OSError):     # stderr has no reader; the exit code still tells
        print(sentence, file=sys.stderr, flush=True)
    sys.exit(exit_code)


# ---- --check-build -------------------------------------------------------------------------------------------

_FRAMEWORKS = (("TensorFlow", "tensorflow"), ("PyTorch", "torch"))
# In rising order, under the names of bhvd_cpu_features: a CPU with one feature has all before it.
_CPU_FEATURES = ("scalar", "avx2", "avx512")


def _line(available, name, note=""):
    return f"    [{'X' if available else ' '}] {name}" + (f"  ({note})" if note else "")


@contextmanager
def _quiet():
    """Discards all output to descriptor 2, from any language."""
    sys.stderr.flush()
    with open(os.devnull, "wb") as nowhere:
        stderr = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)


def _framework(name, module):
    if importlib.util.find_spec(module) is None:
        return _line(False, name, "not installed")
    # Reports the error of a broken installation, without the framework's own messages at import.
    try:
        with _quiet():
            importlib.import_module(module)
    except Exception as error:
        return _line(False, name, f"import {module} fails: {error}")
    return _line(True, name)


def _native():
    """(the cffi library or None, why it is None)."""
    try:
        from bagua_hvd._native import lib
    except ImportError as error:
        return None, f"not built: run `pip install .` in the source folder of bagua_hvd; {error}"
    return lib, ""


def _starters():
    """The programs in PATH that baguarun uses to start ranks, and those that start ranks themselves."""
    lines = [_line(True, "baguarun on this host")]
    for name, program in (("baguarun on other hosts, by ssh", "ssh"), ("mpirun", "mpirun"), ("srun", "srun"),
                          ("torchrun", "torchrun")):
        path = shutil.which(program)
        lines.append(_line(path is not None, name, path or f"no {program} in PATH"))
    return lines


def _version(number, major, minor):
    return f"{number // major}.{number % major // minor}"


def _operations(built):
    """Horovod's names of the libraries that move tensors."""
    if not built:
        return [_line(False, name) for name in ("NCCL", "DDL", "CCL", "MPI", "Gloo")]
    from bagua_hvd.job import runtime

    available = {"NCCL": runtime.nccl_built(), "DDL": runtime.ddl_built(), "CCL": runtime.ccl_built(), "MPI": True,
                 "Gloo": True}
    return [_line(found, name) for name, found in available.items()]


def _gpus(built):
    """The parts of CUDA on this host: driver and NCCL are loaded at run time, CuPy compiles the kernels."""
    if not built:
        return [_line(False, "CUDA", "needs the native extension")]
    from bagua_hvd.core import device

    version, count, missing = device.cuda_facts()
    lines = [_line(count > 0, "CUDA", missing or f"driver of CUDA {_version(version, 1000, 10)}, {count} GPUs")]
    version, missing = device.nccl_facts()
    lines.append(_line(not missing, "NCCL", missing or f"{_version(version, 10000, 100)} found"))
    found = importlib.util.find_spec("cupy") is not None
    lines.append(_line(found, "CuPy", "" if found else "not installed: without it kernels are replaced by copies"))
    return lines


def check_build(verbose: object) -> None:
    """Prints the capabilities of this installation. Imports the installed frameworks, so it may take seconds."""
    lib, reason = _native()
    built = lib is not None
    lines = [f"bagua_hvd v{__version__}:", "", "Available Frameworks:"]
    lines += [_framework(*framework) for framework in _FRAMEWORKS]
    lines += ["", "Native Extension:", _line(built, "bagua_hvd._native", reason)]
    lines += ["", "Available Controllers:", _line(built, "MPI", "that of mpirun, found at run time"),
              _line(built, "Gloo", "the built-in one")]
    lines += ["", "Available Tensor Operations:", *_operations(built)]
    lines += ["", "Available Transports:"] + [_line(built, name) for name in ("inproc", "shm", "tcp", "mpi")]
    lines += ["", "Ways to Start Ranks:", *_starters(), "", "GPUs:", *_gpus(built), "", "CPU Features:"]
    if built:
        from bagua_hvd._native import ffi

        best = ffi.string(lib.bhvd_cpu_features()).decode()
        names = _CPU_FEATURES if best in _CPU_FEATURES else (best,)
        lines += [_line(names.index(name) <= names.index(best), name) for name in names]
    else:
        lines.append(_line(False, "unknown"))
    print("\n".join(lines))


if __name__ == "__main__":
    run_commandline()
