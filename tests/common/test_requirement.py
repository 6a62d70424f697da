"""Errors of importing `.torch`, `.tensorflow` or `.keras` without their requirements, which fakes replace here."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("module", "framework", "oldest"), [
    ("torch", "Torch", "2.3"), ("tensorflow", "TensorFlow", "2.16"), ("keras", "Keras", "3.0")])
@pytest.mark.parametrize("text, fragment", [
    ("raise ModuleNotFoundError(\"No module named '{0}'\", name='{0}')", "none is installed: run `pip install {0}`"),
    ("__version__ = '1.9.1+cpu'", "1.9.1+cpu is installed: run `pip install --upgrade {0}`"),
    ("__version__ = '2.1.0a0'", "2.1.0a0 is installed"),
])
def test_one_sentence(tmp_path, module, framework, oldest, text, fragment):
    (tmp_path / f"{module}.py").write_text(text.format(module))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    result = subprocess.run([sys.executable, "-c", f"import bagua_hvd.{module}"], env=environment, text=True,
                            capture_output=True)
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith(f"ImportError: bagua_hvd.{module} needs {framework} {oldest} or later")
    assert fragment.format(module) in last_line
    assert "During handling" not in result.stderr


def test_a_config_file_needs_an_extra(tmp_path):
    (tmp_path / "yaml.py").write_text("raise ModuleNotFoundError(\"No module named 'yaml'\", name='yaml')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "bagua_hvd.runner.launch", "-np", "1", "--config-file", "job.yaml", "true"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("baguarun: error: --config-file needs PyYAML: pip install 'bagua_hvd[yaml]'")
    assert done.stderr.count("\n") == 1
