"""The wheel that provides bagua_hvd under the name horovod: installed by pip into a folder, and used from there."""
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launcher import MARK, ROOT

SCRIPT = """
import importlib.metadata, subprocess, sys
import horovod.torch as hvd
import torch
hvd.init()
assert hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item() == 1
if hvd.rank() == 0:
    print("metadata", importlib.metadata.version("horovod"))
# A Python of its own, which nobody told anything:
code = "import horovod.torch.mpi_ops as ops; print(ops.__name__)"
done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
print("child", done.stdout.strip())
"""


def written(folder):
    done = subprocess.run([sys.executable, "-m", "bagua_hvd.as_horovod", str(folder)], cwd=ROOT, capture_output=True,
                          text=True, timeout=60, check=True)
    return Path(done.stdout.splitlines()[0])


@pytest.fixture
def installed(tmp_path):
    """The environment of a process that has the wheel installed."""
    wheel, target = written(tmp_path / "made" / "here"), tmp_path / "installed"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target,
                    wheel], check=True, timeout=60, capture_output=True)
    return {**os.environ, "PYTHONPATH": f"{target}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1",
            "PATH": f"{target / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def python(installed, code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=installed,
                          cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_horovodrun(installed, launcher):
    """horovodrun with two ranks, and the processes that they start."""
    pytest.importorskip("torch")
    script = launcher.folder / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(["horovodrun", "-np", "2", sys.executable, script], capture_output=True, text=True,
                          timeout=100, env={**installed, MARK: launcher.mark}, cwd=launcher.folder)
    assert done.returncode == 0, done.stderr
    assert "metadata 0.28.1+bagua.hvd." in done.stdout
    assert done.stdout.count("child bagua_hvd.torch.mpi_ops") == 2


def test_modules_are_ours(installed):
    python(installed, """
import horovod
import bagua_hvd, sys
assert horovod is bagua_hvd is sys.modules["horovod"]
from horovod.common.exceptions import HorovodInternalError
from bagua_hvd.core import exceptions
assert HorovodInternalError is exceptions.HorovodInternalError
import importlib
assert importlib.import_module("horovod") is bagua_hvd
""")
    python(installed, """
import importlib.util
assert importlib.util.find_spec("horovod") is not None      # how clients ask whether there is one
assert importlib.util.find_spec("horovod.torch") is not None
""")
    python(installed, """
import bagua_hvd.as_horovod, horovod, bagua_hvd
assert horovod is bagua_hvd
""")


def test_requirements_are_met(installed):
    out = python(installed, """
from importlib.metadata import distribution
from packaging.specifiers import SpecifierSet
found = distribution("horovod")
for asked in ("", "==0.28.1", ">=0.21,<1", "~=0.28"):
    assert SpecifierSet(asked).contains(found.version), asked
assert not SpecifierSet(">=1").contains(found.version)
print(found.requires, [entry.name for entry in found.entry_points])
""")
    assert out.strip() == "['bagua_hvd'] ['horovodrun']"


def test_the_same_file_each_time(tmp_path):
    first, second = written(tmp_path / "a"), written(tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as wheel:
        record, = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("RECORD"))
        assert [line.split(",")[0] for line in record.splitlines()] == wheel.namelist()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = subprocess.run([sys.executable, "-m", "bagua_hvd.as_horovod", str(tmp_path / "file")], cwd=ROOT,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "the wheel cannot be written" in done.stderr and "Traceback" not in done.stderr
