"""The "mpi" transport in jobs of MPICH's mpiexec and Open MPI's mpirun: real processes, hosts simulated by host ids."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engines import BIN, STANDARD_ABI, open_mpi, starter

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
RANK = str(ROOT / "tests" / "support" / "mpi_rank.py")
ENGINES = ["mpich", "openmpi"]


def environment(tmp_path):
    """Without any launcher's variables, and with the test's own home and folder for temporary files."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("HOROVOD_", "BAGUA_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]), "HOME": str(tmp_path),
            "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "HOROVOD_START_TIMEOUT": "100",
            "BAGUA_HVD_TRANSPORT": "mpi"}


@pytest.fixture
def run(tmp_path):
    """Runs mpi_rank.py on these hosts with these parts; returns the finished process."""
    def run(engine, hosts, *parts, timeout=200, flags=(), **more):
        command = starter(engine, len(hosts))
        command[1:1] = flags
        env = {**environment(tmp_path), **more}
        if engine == "abi":
            if not STANDARD_ABI.exists():
                pytest.skip("needs an MPI with the standard ABI: pip install 'mpich>=5'")
            env["BAGUA_HVD_MPI_LIBRARY"] = str(STANDARD_ABI)
            parts = ["standard", *parts]
        return subprocess.run([*command, RANK, hosts, *parts], env=env, capture_output=True, text=True,
                              timeout=timeout, cwd=tmp_path)
    return run


def assert_fine(done, ranks):
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in ranks:
        assert f"rank {rank}: fine" in done.stdout, done.stdout + done.stderr


LAYOUTS = {
    "mpich": ["AB", "ABC", "AAB", "ABAB", "AABC", "ABCD", "AAA"],
    # Layouts are handled by our code for any library; Open MPI can only differ in its interface.
    "openmpi": ["AB", "AAB", "ABAB", "ABCD"],
    # MPI's standard ABI, in a library of MPICH that differs from the other one in its interface only.
    "abi": ["AAB", "ABCD"],
}
SHORT = {("mpich", "ABAB"), ("openmpi", "AAB"), ("abi", "AAB")}


@pytest.mark.parametrize("engine, hosts", [
    pytest.param(engine, hosts, marks=[] if (engine, hosts) in SHORT else [pytest.mark.long])
    for engine in LAYOUTS for hosts in LAYOUTS[engine]])
def test_values(run, engine, hosts):
    parts = ["facts", "allreduce", "gather", "broadcast", "reducescatter", "alltoall", "primitives"]
    assert_fine(run(engine, hosts, *parts), range(len(hosts)))


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_big_and_many(run, engine):
    assert_fine(run(engine, "AB", "big", "many"), range(2))


@pytest.mark.long
@pytest.mark.parametrize("path", ["ring", "doubling", "halving"])
def test_paths(run, path):
    assert_fine(run("mpich", "ABCD", "allreduce", BAGUA_HVD_ALLREDUCE=path), range(4))


def test_streams(run):
    """Their number is that of TCP connections, which MPI does not use."""
    assert_fine(run("mpich", "AB", "facts", "allreduce", BAGUA_HVD_STREAMS="2"), range(2))


@pytest.mark.parametrize("engine, exchange", [
    ("openmpi", "mpi"), *(pytest.param(*more, marks=pytest.mark.long) for more in [
        ("mpich", "file"), ("mpich", "mpi"), ("openmpi", "file"), ("abi", "mpi")])])
def test_several_lives(run, engine, exchange):
    assert_fine(run(engine, "ABB", "again", "many", BAGUA_HVD_EXCHANGE=exchange), range(3))


@pytest.mark.parametrize("parts", [["mpi4py"], ["mpi4py_first", "mpi4py", "again"]], ids=["after", "before"])
def test_beside_mpi4py(run, parts):
    pytest.importorskip("mpi4py")
    assert_fine(run("mpich", "AB", *parts), range(2))


def test_lost_rank(run):
    """mpiexec is told not to end the job; the others continue without that rank."""
    done = run("mpich", "ABCC", "lost", flags=["-disable-auto-cleanup"])
    for rank in (0, 2, 3):
        assert f"rank {rank}: fine" in done.stdout, done.stdout + done.stderr
    assert "rank 1: fine" not in done.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_killed_rank(run, engine):
    done = run(engine, "ABC", "killed")
    assert done.returncode != 0 and "fine" not in done.stdout


# ---- errors -----------------------------------------------------------------------------------------------------

def test_not_started_by_mpirun(tmp_path):
    script = "from bagua_hvd.job import basics as hvd\nhvd.init()\n"
    done = subprocess.run([*starter("baguarun", 2), "-c", script], env=environment(tmp_path), capture_output=True,
                          text=True, timeout=100)
    assert done.returncode != 0
    assert "BAGUA_HVD_TRANSPORT=mpi: no mpirun started this process; start the job by mpirun, srun or" in done.stderr


def test_no_library(tmp_path):
    """A Python without an MPI library beside it, in a job of Open MPI."""
    if (mpirun := open_mpi()) is None:
        pytest.skip("needs Open MPI")
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nfor name in ('OMPI_LIBDIR_LOC', 'OPAL_PREFIX'): os.environ.pop(name, None)\n"
                      "sys.prefix = '/nowhere'\nfrom bagua_hvd.job import basics as hvd\nhvd.init()\n")
    done = subprocess.run(
        [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", "env", "-u", "LD_LIBRARY_PATH", sys.executable,
         str(script)],
        env=environment(tmp_path), capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "no library of the MPI that started this process was found (" in done.stderr
    assert "leave BAGUA_HVD_TRANSPORT out" in done.stderr


@pytest.mark.parametrize("library, words", [
    ("/no/such/library.so", "it cannot be loaded (/no/such/library.so: cannot open shared object file"),
    ("libc.so.6", "libc.so.6: it does not report its version)")])
def test_a_library_that_is_none(run, library, words):
    """No other library is tried instead."""
    done = run("mpich", "AB", "facts", BAGUA_HVD_MPI_LIBRARY=library, HOROVOD_START_TIMEOUT="3")
    assert done.returncode != 0 and words in done.stderr


def test_ranks_that_disagree(tmp_path):
    """MPI runs already; otherwise MPI_Init would wait for the ranks that do not call it."""
    pytest.importorskip("mpi4py")
    script = tmp_path / "script.py"
    script.write_text("import os\nif os.environ['PMI_RANK'] == '1': os.environ['BAGUA_HVD_TRANSPORT'] = 'auto'\n"
                      + Path(RANK).read_text())
    done = subprocess.run(
        [*starter("mpich", 2), str(script), "AB", "mpi4py_first", "facts"], capture_output=True, text=True, timeout=100,
        env=environment(tmp_path))
    assert done.returncode != 0 and "give all ranks the same BAGUA_HVD_TRANSPORT" in done.stderr


# ---- baguarun --mpi ---------------------------------------------------------------------------------------------

def test_baguarun_mpi_uses_it(launcher):
    if shutil.which("mpiexec.hydra", path=str(BIN)) is None:
        pytest.skip("needs MPICH: pip install mpich")
    # One write for each line: mpiexec mixes the ranks' writes.
    script = ("import sys\nfrom bagua_hvd.job import basics as hvd\nhvd.init()\n"
              "sys.stdout.write('enabled\\n' if hvd.mpi_enabled() else 'not enabled\\n')\n")
    env = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HOROVOD_START_TIMEOUT": "80"}
    for given, words in ({}, "enabled"), ({"BAGUA_HVD_TRANSPORT": "auto"}, "not enabled"):
        done = launcher.run("--mpi", "-np", 2, sys.executable, "-c", script, timeout=100, env={**env, **given})
        assert done.returncode == 0 and done.stdout.count(f"] {words}\n") == 2, done.stdout + done.stderr
