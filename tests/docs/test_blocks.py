"""Runs every code block of every page, unless a comment before the block says why not.

Blocks of a page with files (blocks with a title) are run by test_site.py, together with the page's console blocks.
"""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import page_blocks

ROOT = page_blocks.ROOT
PAGES = {page.name: page for page in page_blocks.pages()}
# They need a cluster; their examples are run where Ray or Spark is installed (tests/ray, tests/spark).
CLUSTERS = {"ray.md", "spark.md"}
KNOWN = {"python", "console", "bash", "yaml", *page_blocks.TEXTS}
# Pages with blocks that are marked as code by indentation only.
INDENTED = {"data.md", "running.md"}
TRAIN = """
import torch
import bagua_hvd.torch as hvd

hvd.init()
print(hvd.allreduce(torch.ones(2), name="x"))
"""

pytestmark = pytest.mark.timeout(240)


def found(name, language):
    return [block for block in page_blocks.blocks(PAGES[name]) if block.language == language and not block.reason]


def has_files(name):
    return any(block.title for block in page_blocks.blocks(PAGES[name]))


def with_python():
    return [name for name in PAGES if name not in CLUSTERS and any(not block.title for block in found(name, "python"))]


def with_commands():
    return [name for name in PAGES if not has_files(name) and any(block.commands() for block in found(name, "console"))]


@pytest.mark.parametrize("name", PAGES)
def test_every_block_says_what_it_is(name):
    blocks = page_blocks.blocks(PAGES[name])
    assert {block.language for block in blocks if not block.reason} <= KNOWN, "```text for what is no code"
    assert not [block.line for block in blocks if block.language == "console" and not block.commands()]
    for block in blocks:
        if block.language == "python":
            page_blocks.compiled(block)
    assert name in INDENTED or not page_blocks.indented(PAGES[name]), "write ```console and $ before each command"


@pytest.mark.parametrize("name", with_python())
def test_python(name, launcher, tmp_path):
    if name == "lightning.md":
        pytest.importorskip("lightning.pytorch")
    if name.startswith("keras"):
        pytest.importorskip("keras")
    program, env = [Path(page_blocks.__file__), name], {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    if name == "torch-distributed.md":      # torchrun sets the variables for init_process_group()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run([*torchrun, *program], cwd=tmp_path, env=os.environ | env, capture_output=True, text=True,
                              timeout=200)
    else:
        done = launcher.run("-np", 2, sys.executable, *program, env=env, timeout=200)
    count = sum(not block.title for block in found(name, "python"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"ran {count} blocks") == 2


@pytest.mark.parametrize("name", with_commands())
def test_commands(name, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "horovod_script.py").write_text(TRAIN.replace("bagua_hvd", "horovod"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
                   "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    for block in found(name, "console"):
        for command in block.commands():
            program = re.sub(r"^(\w+=\S+ )*", "", command).split()[0]
            if program in ("mpiexec", "mpirun") and not shutil.which(program, path=environment["PATH"]):
                pytest.skip(f"{program} is not there")
            done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
            assert done.returncode == 0, f"{name}:{block.line}: {command}\n{done.stdout}"


def test_yaml():
    yaml = pytest.importorskip("yaml")
    for name in PAGES:
        for block in found(name, "yaml"):
            assert yaml.safe_load(block.text)


def test_the_page_of_examples_names_all_and_what_they_import():
    rows = dict(re.findall(r"^\| `?([^|]*?)`? \| [^|]* \| ([^|]*) \|$", PAGES["examples.md"].read_text(), re.M))
    needs = {name.strip("` "): needed for names, needed in rows.items() for name in names.split("`, `")}
    examples = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    assert examples.keys() <= needs.keys()
    packages = {"torch": "torch", "keras": "keras", "tensorflow": "tensorflow", "sklearn": "scikit-learn",
                "tqdm": "tqdm", "ray": "`ray`", "pyspark": "`spark`", "lightning": "`lightning`"}
    for name, text in examples.items():
        for module in set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.M)) & packages.keys():
            words = needs[name].replace("extra `lightning`", "extra `lightning`, torch").replace(
                "tensorflow", "tensorflow, keras")
            assert packages[module] in words, f"{name} imports {module}"
