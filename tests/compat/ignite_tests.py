"""Runs pytorch-ignite's own tests of its "horovod" backend on bagua_hvd.

    pip download --no-deps --no-binary :all: pytorch-ignite && tar xzf pytorch_ignite-*.tar.gz
    python tests/compat/ignite_tests.py pytorch_ignite-0.5.5 --ranks 4 [-k auto] [--launch] [tests/ignite/PATH]

Other arguments go to pytest; write values after "=".

The tests start ranks with `horovod.run`. Such a rank imports torch, scikit-learn and the tests, which takes far longer
than the test itself. So here ranks are forked from a process that has imported them; --launch uses bagua_hvd's own
run() instead. Tests that start a command or a Python need the wheel of `python -m bagua_hvd.as_horovod`, installed
beside Ignite: they set PYTHONPATH to that folder.
"""
import argparse
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[1] / "support"
RANKS = "4 if not torch.cuda.is_available()"        # replaced in each test


def forked_run(func, args=(), kwargs=None, num_proc=1, **options):
    """Like horovod.run: returns the results in rank order. The ranks are forks of this process, on this host."""
    from bagua_hvd.job.rendezvous import Rendezvous
    from ranks import job_environment

    secret = secrets.token_bytes(32)
    rendezvous = Rendezvous(secret)
    processes = {}
    try:
        for rank in range(num_proc):
            environment = job_environment(rank, num_proc, rendezvous.port, secret, _own_settings())
            if not (pid := os.fork()):
                _be_rank(environment, func, args, kwargs or {})
            processes[pid] = rank
        failed = {}
        while processes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in processes:
                rank = processes.pop(pid)
                if status:
                    failed[rank] = os.waitstatus_to_exitcode(status)
                    break
            time.sleep(0.01)
        if failed:
            raise RuntimeError(f"ranks ended with {failed}")
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        rendezvous.close()
    return [None] * num_proc        # no test uses the results


def _own_settings():
    """HOROVOD_DYNAMIC_PROCESS_SETS, which Ignite sets for the ranks when it is imported."""
    return {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}


def _be_rank(environment, func, args, kwargs):
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        func(*args, **kwargs)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="its source, unpacked")
    parser.add_argument("--ranks", type=int, default=4, help="default: 4, as in the tests")
    parser.add_argument("--launch", action="store_true", help="start ranks by bagua_hvd.run()")
    parser.add_argument("-k", dest="pattern", default="", help="which of these tests, as pytest's -k")
    arguments, rest = parser.parse_known_args()
    paths = [argument for argument in rest if argument.startswith("tests/")] or ["tests/ignite"]
    rest = [argument for argument in rest if argument not in paths]

    import bagua_hvd.as_horovod  # noqa: F401  (before anything imports Horovod)

    sys.path.append(str(SUPPORT))
    if not arguments.launch:
        sys.modules["horovod"].run = forked_run
    with tempfile.TemporaryDirectory(prefix="ignite_tests.") as work:
        shutil.copytree(arguments.folder / "tests", Path(work) / "tests")
        for file in Path(work).rglob("*.py"):
            if RANKS in (text := file.read_text()):
                file.write_text(text.replace(RANKS, RANKS.replace("4", str(arguments.ranks), 1)))
        os.chdir(work)
        sys.path.insert(0, work)

        import pytest

        pattern = "(hvd or horovod)" + (f" and ({arguments.pattern})" if arguments.pattern else "")
        return pytest.main(["-p", "no:cacheprovider", "--rootdir", work, "--continue-on-collection-errors",
                            "--timeout=300", "-rfEs", "-k", pattern, *rest, *paths])


if __name__ == "__main__":
    sys.exit(main())
