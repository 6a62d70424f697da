"""One unchanged script under baguarun, mpiexec, mpirun, torchrun, srun-like variables, and without a launcher."""
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_hvd.job import join
from bagua_hvd.job.engines import ExchangeUnavailable, FileExchange, Placement, detect, folder
from bagua_hvd.job.join import Membership
from engines import SCRIPT, THREE_ON_ONE_HOST, TORCH_SCRIPT, starter
from ports import free_port

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[2]
@pytest.fixture
def environment(tmp_path):
    """Without any launcher's variables, and with the test's own home and folder for temporary files."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("HOROVOD_", "BAGUA_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "TMPDIR": str(tmp_path),
            "OMP_NUM_THREADS": "1", "HOROVOD_START_TIMEOUT": "100"}


def run(command, script, environment, tmp_path, timeout=120):
    path = tmp_path / "script.py"
    path.write_text(script)
    return subprocess.run([*command, str(path)], env=environment, capture_output=True, text=True, timeout=timeout)


def numbers(done):
    """The numbers that the ranks printed, in rank order."""
    assert done.returncode == 0, done.stdout + done.stderr
    # mpiexec merges simultaneous writes of several ranks, and baguarun adds the rank as a prefix.
    decoder, text, found = json.JSONDecoder(), done.stdout, []
    lines = "".join(line.rpartition("<stdout>:")[2] for line in text.splitlines()).replace("][", "]\n[").splitlines()
    for line in lines:
        found.append(decoder.decode(line))
    return sorted(found)


@pytest.mark.parametrize("engine", [
    "baguarun", "mpich", pytest.param("openmpi", marks=pytest.mark.long), "torchrun"])
def test_one_script(engine, environment, tmp_path):
    assert numbers(run(starter(engine, 3), TORCH_SCRIPT, environment, tmp_path)) == THREE_ON_ONE_HOST


def test_one_script_by_itself(environment, tmp_path):
    assert numbers(run(starter("python", 1), TORCH_SCRIPT, environment, tmp_path)) == [[0, 1, 0, 1, 0, 1, 1.0]]


@pytest.mark.parametrize("engine", ["mpich", "openmpi"])
def test_exchange_by_mpi(engine, environment, tmp_path):
    done = run(starter(engine, 3), SCRIPT, {**environment, "BAGUA_HVD_EXCHANGE": "mpi"}, tmp_path)
    assert numbers(done) == THREE_ON_ONE_HOST


@pytest.mark.parametrize("when", ["before", "after"])
def test_beside_mpi4py(when, environment, tmp_path):
    pytest.importorskip("mpi4py")
    use = "from mpi4py import MPI; assert MPI.COMM_WORLD.allreduce(1) == 3\n"
    script = use + SCRIPT if when == "before" else SCRIPT.replace("sys.stdout", use + "sys.stdout")
    done = run(starter("mpich", 3), script, {**environment, "BAGUA_HVD_EXCHANGE": "mpi"}, tmp_path)
    assert numbers(done) == THREE_ON_ONE_HOST


@pytest.mark.parametrize("rank", [0, 1])
def test_no_such_interface(rank, monkeypatch):
    """Every rank raises the error: the others do not wait for rank 0."""
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "nosuch0")
    with pytest.raises(ValueError, match="HOROVOD_GLOO_IFACE='nosuch0': expected one of .*lo"):
        Membership(Placement("slurm", rank, 2, 1, "job"), 1, FileExchange("job", True))


# MPICH's mpiexec does not end the others when a rank dies that has not initialized MPI.
@pytest.mark.parametrize("engine, exchange", [("mpich", "mpi"), ("openmpi", ""), ("openmpi", "mpi"),
                                              pytest.param("torchrun", "", marks=pytest.mark.long)])
def test_a_rank_that_fails_ends_the_job(engine, exchange, environment, tmp_path):
    script = SCRIPT + "import time\nif numbers[0] == 1: raise RuntimeError('mine')\ntime.sleep(100)\n"
    if exchange:
        environment["BAGUA_HVD_EXCHANGE"] = exchange
    done = run(starter(engine, 3), script, environment, tmp_path, timeout=90)
    assert done.returncode != 0 and "RuntimeError: mine" in done.stderr


@pytest.mark.long
def test_torchrun_restarts(environment, tmp_path):
    script = SCRIPT + "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise RuntimeError('first')\n"
    command = starter("torchrun", 3)
    done = run([*command, "--max-restarts", "1"], script.replace("sys.stdout.write", "_ = "), environment, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("more", [
    {}, pytest.param({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "3", "HOROVOD_GLOO_RENDEZVOUS_PORT": "0"},
                     marks=pytest.mark.long)])
@pytest.mark.long
def test_torchs_variables_alone(more, environment, tmp_path):
    """As set by Kubernetes' PyTorchJob; torch.distributed uses the same port for its rendezvous."""
    script = TORCH_SCRIPT + """
torch.distributed.init_process_group("gloo")
total = torch.ones(1)
torch.distributed.all_reduce(total)
assert total.item() == 3
torch.distributed.destroy_process_group()
"""
    port = free_port()
    (tmp_path / "script.py").write_text(script)
    popens = []
    for rank in range(3):
        torchs = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "3", **more}
        if "HOROVOD_RANK" in more:
            torchs["HOROVOD_RANK"] = str(rank)
        popens.append(subprocess.Popen([sys.executable, str(tmp_path / "script.py")], env={**environment, **torchs},
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [popen.communicate(timeout=100) for popen in popens]
    assert [popen.returncode for popen in popens] == [0] * 3, outputs
    assert [json.loads(stdout.splitlines()[0]) for stdout, _ in outputs] == THREE_ON_ONE_HOST


def test_a_secret_of_the_users_own(environment, tmp_path):
    """The message does not contain it, and ranks with another secret are rejected."""
    script = "import os\nif os.environ['PMI_RANK'] == '1': os.environ['_HOROVOD_SECRET_KEY'] = 'b3RoZXI='\n" + SCRIPT
    environment["_HOROVOD_SECRET_KEY"] = "bWluZQ=="
    assert numbers(run(starter("mpich", 3), SCRIPT, environment, tmp_path)) == THREE_ON_ONE_HOST
    done = run(starter("mpich", 2), script, {**environment, "HOROVOD_START_TIMEOUT": "5"}, tmp_path)
    assert done.returncode != 0 and "Horovod initialization failed" in done.stderr


def test_slurm_on_three_hosts(namespaces, environment, tmp_path):
    """srun's variables, on hosts that share only the home."""
    (tmp_path / "script.py").write_text(SCRIPT)
    popens = []
    for rank, host in enumerate([0, 1, 1, 2]):
        slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "4",
                 "SLURM_STEP_NUM_NODES": "3", "BAGUA_HVD_EXCHANGE": "file"}
        popens.append(subprocess.Popen(
            [*namespaces.enter(host), sys.executable, str(tmp_path / "script.py")], env={**environment, **slurm},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [popen.communicate(timeout=120) for popen in popens]
    assert [popen.returncode for popen in popens] == [0] * 4, outputs
    assert [json.loads(stdout) for stdout, _ in outputs] == [
        [0, 4, 0, 1, 0, 3, 15.0], [1, 4, 0, 2, 1, 3, 15.0], [2, 4, 1, 2, 0, 1, 15.0], [3, 4, 0, 1, 2, 3, 15.0]]
    assert list((tmp_path / ".bagua_hvd").iterdir()) == []


@pytest.mark.parametrize("name", ["PMIX_RANK", "PMI_FD", None])
def test_only_an_srun_with_pmi_starts_mpi(name, monkeypatch):
    """MPI_Init would end the process."""
    for variable in [variable for variable in os.environ if variable.startswith("PMI")]:
        monkeypatch.delenv(variable)
    monkeypatch.delenv("BAGUA_HVD_EXCHANGE", raising=False)
    if name:
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(join.engines, "MpiExchange", lambda placement: "MpiExchange")
    monkeypatch.setattr(join.engines, "FileExchange", lambda job, one_host: "FileExchange")
    assert join._exchange(Placement("slurm", 0, 2, 1, "7.0"), False, 1) == ("MpiExchange" if name else "FileExchange")


def slurm_ranks(size, environment, tmp_path, script=SCRIPT, **variables):
    """Popens of the ranks of one Slurm step on this host, with srun's variables."""
    (tmp_path / "script.py").write_text(script)
    names = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(size),
             "SLURM_STEP_NUM_NODES": "1", "BAGUA_HVD_EXCHANGE": "file", **variables}
    return [subprocess.Popen([sys.executable, str(tmp_path / "script.py")], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True,
                             env={**environment, **names, "SLURM_PROCID": str(rank)}) for rank in range(size)]


def sums(popens):
    outputs = [popen.communicate(timeout=120) for popen in popens]
    assert [popen.returncode for popen in popens] == [0] * len(popens), outputs
    return [json.loads(stdout)[-1] for stdout, _ in outputs]


def test_two_clusters_with_one_home_keep_their_ranks_apart(environment, tmp_path):
    west = slurm_ranks(2, environment, tmp_path, SLURM_CLUSTER_NAME="west")
    east = slurm_ranks(3, environment, tmp_path, SLURM_CLUSTER_NAME="east")
    assert (sums(west), sums(east)) == ([3.0] * 2, [7.0] * 3)


@pytest.mark.parametrize("who", ["killed", "another job's"])
def test_a_message_that_was_left_over_is_looked_at_again(who, environment, tmp_path, monkeypatch):
    """The message is from a rank 0 of the same step that was killed before the others started, or from another job."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job = detect({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}).job
    stale = {"port": free_port(), "secret": "c2VjcmV0", "addresses": ["127.0.0.1"],
             "job": job if who == "killed" else "slurm-8-0"}
    FileExchange(job, True).send(json.dumps(stale).encode())
    first, *others = reversed(slurm_ranks(2, environment, tmp_path, "import sys, time\n"
                                          "import os; os.environ['SLURM_PROCID'] == '0' and time.sleep(3)\n" + SCRIPT))
    assert sums([first, *others]) == [3.0] * 2


def test_a_port_that_is_in_use_is_named_with_its_remedy(environment, tmp_path):
    pytest.importorskip("torch")
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        done = run([sys.executable], SCRIPT, {**environment, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                                              "MASTER_PORT": str(port)}, tmp_path)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}: MASTER_PORT is in use on this host; set another one" in done.stderr


@pytest.mark.parametrize("variables, sentence", [
    ({"MASTER_PORT": "29500"}, "MASTER_ADDR is not set"),
    ({"MASTER_PORT": "29500", "MASTER_ADDR": ""}, "MASTER_ADDR is ''"),
    ({"MASTER_PORT": "abc", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is 'abc'"),
    ({"MASTER_PORT": "65536", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is '65536'"),
])
def test_torchs_variables_that_are_wrong_are_named(variables, sentence, monkeypatch):
    pytest.importorskip("torch")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"environment variable {sentence}"):
        Membership(detect(), 1)


MPI_FLAGS = {
    "mpich": ["-hosts", "{hosts}", "-launcher", "ssh", "-launcher-exec", "{rsh}", "-iface", "eth0", "-genvall"],
    "openmpi": ["-H", "{hosts}", "--mca", "plm_ssh_agent", "{rsh}", "--bind-to", "none", "--prtemca", "prte_if_include",
                "eth0", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "eth0", "-x", "PYTHONPATH",
                "-x", "HOROVOD_START_TIMEOUT", "-x", "BAGUA_HVD_EXCHANGE"],
}


@pytest.mark.parametrize("engine", MPI_FLAGS)
def test_mpi_on_three_hosts(engine, namespaces, environment, tmp_path):
    *command, python = starter(engine, 5)
    command = [part for part in command if part != "--oversubscribe"]
    flags = [flag.format(hosts="10.0.0.1:2,10.0.0.2:1,10.0.0.3:2", rsh=namespaces.rsh) for flag in MPI_FLAGS[engine]]
    # BAGUA_HVD_EXCHANGE rules out a file, which would work, too, because the hosts share the home.
    done = run([*namespaces.enter(0), *command, *flags, python], SCRIPT, {**environment, "BAGUA_HVD_EXCHANGE": "mpi"},
               tmp_path)
    assert numbers(done) == [[0, 5, 0, 2, 0, 3, 31.0], [1, 5, 1, 2, 0, 2, 31.0], [2, 5, 0, 1, 1, 3, 31.0],
                             [3, 5, 0, 2, 2, 3, 31.0], [4, 5, 1, 2, 1, 2, 31.0]]


# ---- detection --------------------------------------------------------------------------------------------------

HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "6", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            "PMIX_NAMESPACE": "prterun-x-5@1"}


@pytest.mark.parametrize("variables, placement", [
    ({}, None),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),     # the batch script itself
    ({"RANK": "0", "WORLD_SIZE": "2"}, None),
    ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, None),       # as a notebook exports them
    ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, Placement("env", 1, 2, None, None)),
    (HYDRA, Placement("hydra", 1, 4, 2, None)),
    (OPEN_MPI, Placement("openmpi", 3, 8, 4, "openmpi-prterun-x-5@1")),
    (SLURM, Placement("slurm", 2, 6, None, "slurm-12-3")),
    ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, Placement("slurm", 2, 6, 6, "slurm-12-3")),
    ({**SLURM, "SLURM_CLUSTER_NAME": "west", "SLURM_STEP_LAUNCHER_PORT": "41"},
     Placement("slurm", 2, 6, None, "slurm-west-12-3-41")),
    ({**SLURM, **HYDRA}, Placement("hydra", 1, 4, 2, None)),        # hydra's proxies run as steps of Slurm
    ({**SLURM, **OPEN_MPI, **TORCHRUN}, Placement("torchrun", 1, 2, 1, None)),
])
def test_detect(variables, placement):
    assert detect(variables) == placement


def test_detect_names_what_is_wrong():
    with pytest.raises(ValueError, match="started by hydra, but environment variable PMI_SIZE is not set"):
        detect({"MPI_LOCALRANKID": "0", "PMI_RANK": "0"})
    with pytest.raises(ValueError, match="started by env, but environment variable WORLD_SIZE is not set"):
        detect({"MASTER_PORT": "1", "RANK": "0"})


def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bagua_hvd").mkdir(mode=0o755)
    with pytest.raises(ExchangeUnavailable, match="not a folder of this user alone"):
        folder(one_host=False)
    (tmp_path / ".bagua_hvd").rmdir()
    (tmp_path / ".bagua_hvd").symlink_to(tmp_path)
    with pytest.raises(ExchangeUnavailable, match="not a folder of this user alone"):
        folder(one_host=False)


def test_the_message_is_private_and_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    sender, receiver = FileExchange("job", False), FileExchange("job", False)
    with pytest.raises(ExchangeUnavailable, match="rank 0 left no message"):
        receiver.receive(0.05)
    sender.send(b"secret")
    files = list((tmp_path / ".bagua_hvd").iterdir())
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600] and b"job" not in bytes(files[0])
    assert receiver.receive(1) == b"secret"
    sender.close()
    assert list((tmp_path / ".bagua_hvd").iterdir()) == []


def test_a_message_that_cannot_be_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    sender = FileExchange("job", False)
    (tmp_path / ".bagua_hvd").rmdir()
    with pytest.raises(ExchangeUnavailable, match=r"cannot store its message at .*/\.bagua_hvd/\w+: No such file"):
        sender.send(b"secret")
