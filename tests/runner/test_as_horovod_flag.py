"""baguarun --as-horovod runs scripts that import horovod without changes."""
import os
import sys

import pytest

from launcher import ROOT

pytestmark = pytest.mark.timeout(60)

PRINT = "import horovod.common.exceptions as e; print(e.__name__)"


def sitecustomize(folder, text):
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    return str(folder)


def with_path(*folders):
    return {"PYTHONPATH": os.pathsep.join([*folders, str(ROOT)])}


def test_an_unchanged_script(launcher):
    pytest.importorskip("torch")
    script = launcher.folder / "script.py"
    script.write_text("""
import torch
import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
hvd.init()
print(hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), hvd.HorovodInternalError is HorovodInternalError)
""")
    done = launcher.run("-np", 2, "--as-horovod", sys.executable, script.name, timeout=50)
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:2.0 True", "[1]<stdout>:2.0 True"], done.stderr


def test_not_without_the_flag(launcher):
    done = launcher.run("-np", 1, sys.executable, "-c", "import sys; print('bagua_hvd.as_horovod' in sys.modules)")
    assert done.stdout == "[0]<stdout>:False\n"


def test_the_flag_is_told_where_it_is_missing(launcher):
    popen = launcher.start("-np", 2, sys.executable, "-c", "import horovod.torch as hvd")
    stderr = popen.communicate(timeout=50)[1].decode()
    assert stderr.count("baguarun: Add --as-horovod, or import bagua_hvd instead of horovod.") == 1, stderr


@pytest.mark.parametrize("module, argument, words", [
    ("horovod.runner.launch", "--version", "0."),
    ("horovod.tensorflow.data.compute_worker", "--help", "dispatchers")])
def test_a_module_as_a_script(launcher, module, argument, words):
    """For example Horovod's documented command for a data service."""
    if "tensorflow" in module:
        pytest.importorskip("tensorflow")
    done = launcher.run("-np", 1, "--as-horovod", sys.executable, "-m", module, argument, timeout=50)
    assert done.returncode == 0 and words in done.stdout, done.stderr


def test_a_package_without_main_as_a_script(launcher):
    popen = launcher.start("-np", 1, "--as-horovod", sys.executable, "-m", "horovod.common")
    assert b"'horovod.common' is a package and cannot be directly executed" in popen.communicate(timeout=50)[1]


def test_children_of_the_ranks_too(launcher):
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PRINT!r}], check=True)"
    done = launcher.run("-np", 1, "--as-horovod", sys.executable, "-c", code)
    assert done.stdout == "[0]<stdout>:bagua_hvd.common.exceptions\n", done.stderr


def test_the_users_sitecustomize_runs_too(launcher):
    folder = sitecustomize(launcher.folder / "mine", "import os; os.environ['MINE'] = __file__")
    code = f"{PRINT}; import os, sys; print(os.environ['MINE'], sys.modules['sitecustomize'].__file__, sys.path)"
    done = launcher.run("-np", 1, "--as-horovod", sys.executable, "-c", code, env=with_path(folder))
    first, second = done.stdout.splitlines()
    assert first.endswith("bagua_hvd.common.exceptions")
    file = os.path.join(folder, "sitecustomize.py")
    assert second.startswith(f"[0]<stdout>:{file} {file} ") and "startup" not in second


def test_a_failing_sitecustomize_is_reported_as_ever(launcher):
    folder = sitecustomize(launcher.folder / "mine", "raise RuntimeError('mine')")
    done = launcher.run("-np", 1, "--as-horovod", sys.executable, "-c", PRINT, env=with_path(folder))
    assert "RuntimeError: mine" in done.stderr and "bagua_hvd.common.exceptions" in done.stdout


def test_a_python_without_bagua_hvd_is_told(launcher):
    hook = str(ROOT / "bagua_hvd" / "runner" / "startup" / "sitecustomize.py")
    code = f"import runpy; runpy.run_path({hook!r}); print('goes on')"
    # Without site, installed packages are not found.
    done = launcher.run("-np", 1, sys.executable, "-S", "-I", "-c", code)
    assert done.stdout == "[0]<stdout>:goes on\n"
    assert "--as-horovod: no effect in" in done.stderr and "bagua_hvd" in done.stderr
