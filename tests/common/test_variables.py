"""The table of environment variables: complete, equal to its page, and the only code that reads them."""
import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_hvd.core import variables
from bagua_hvd.core.variables import TABLE, read

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bagua_hvd"
OURS = re.compile(r"""["'](_?(?:HOROVOD|BAGUA)_[A-Z0-9_]*[A-Z0-9])["']""")
# The benchmarks pass variables between their processes, and report every setting with these prefixes.
FILES = [path for path in PACKAGE.rglob("*.py") if "bench" not in path.parts and path.name != "variables.py"]


def test_the_page_is_the_table():
    assert (ROOT / "docs" / "environment.md").read_text() == variables.markdown()


def test_every_name_in_the_code_is_in_the_table():
    assert {name for path in FILES for name in OURS.findall(path.read_text())} - TABLE.keys() == set()


def is_environment(node):
    return getattr(node, "attr", None) == "environ" or getattr(node, "id", None) == "environ"


def keys_read(path):
    """The keys that the file reads from os.environ, as syntax trees: `[key]`, `.get(key)`, `key in`, getenv(key)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and is_environment(node.value):
            yield node.slice
        elif isinstance(node, ast.Compare) and any(map(is_environment, node.comparators)):
            yield node.left
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method, of = node.func.attr, node.func.value
            if method == "getenv" or (method in ("get", "setdefault") and is_environment(of)):
                yield node.args[0]


# Here the name is itself a variable: names of other engines and of the loader, two of Horovod's functions, and the
# environment in benchmark reports.
ANY_NAME = {"job/engines.py", "job/environment.py", "runner/processes.py",
            "common/util.py", "bench/report.py"}


def name_in(module, key):
    """The text of a key: a literal, or a constant of the module; None if known only at run time."""
    if isinstance(key, ast.Constant):
        return key.value
    return getattr(importlib.import_module(module), key.id, None) if isinstance(key, ast.Name) else None


def test_nothing_else_reads_them():
    own, any_name = [], set()
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        keys = list(keys_read(path)) if path.name != "variables.py" else []
        for key in keys:
            name = name_in(f"bagua_hvd.{place[:-3].replace('/', '.')}", key)
            if name is None:
                any_name.add(place)
            elif name in TABLE:
                own.append(f"{place}:{key.lineno}: {name}")
    assert own == []
    assert any_name == ANY_NAME
    core = (ROOT / "native").rglob("*.[ch]")        # the core reads no variables
    assert [path for path in core if re.search(r"getenv|\benviron\b", path.read_text())] == []


def test_what_is_said_to_have_an_effect_is_read():
    texts = {path: path.read_text() for path in FILES if path.name != "config_parser.py"}
    unread = [name for name, variable in TABLE.items() if variable.setter != "none"
              and not any(f'"{name}"' in text for text in texts.values())]
    assert unread == []


# Traces every process of a job, including the launcher: sitecustomize is imported first.
TRACE = """
import atexit, os
class Traced(os._Environ):
    seen = set()
    def __getitem__(self, name):            # by get() and `in` as well
        self.seen.add(name)
        return super().__getitem__(name)
    def __iter__(self):                     # whoever copies all asks for none
        before = set(self.seen)
        yield from super().__iter__()
        self.seen &= before
os.environ.__class__ = Traced
def write():
    with open(os.path.join(os.path.dirname(__file__), f"read.{os.getpid()}"), "w") as file:
        file.write(" ".join(name for name in Traced.seen if "HOROVOD" in name or "BAGUA" in name))
atexit.register(write)
"""
TRAINING = """
import torch
import bagua_hvd.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer)
@hvd.elastic.run
def train(state):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    hvd.allreduce(torch.ones(2))
train(state)
hvd.shutdown()
"""


@pytest.mark.parametrize("arguments", [
    pytest.param([], marks=pytest.mark.long), ["--min-np", "2", "--host-discovery-script", "./hosts"]],
                         ids=["static", "elastic"])
def test_what_a_job_reads_is_in_the_table(tmp_path, arguments):
    hosts = tmp_path / "hosts"
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(TRACE)
    (tmp_path / "train.py").write_text(TRAINING)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-m", "bagua_hvd.runner.launch", "-np", "2", *arguments, sys.executable,
                           "train.py"], capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    reads = [set(path.read_text().split()) for path in tmp_path.glob("read.*")]
    ranks = [names for names in reads if "HOROVOD_RANK" in names]
    assert len(ranks) >= 2 and len(reads) > len(ranks), reads        # includes the launcher
    for names in reads:
        assert names <= TABLE.keys(), names - TABLE.keys()
    assert all({"BAGUA_ALGORITHM", "HOROVOD_START_TIMEOUT"} <= names for names in ranks)


@pytest.mark.parametrize(("name", "text", "value"), [
    ("HOROVOD_SIZE", "", 1), ("HOROVOD_SIZE", " 4 ", 4), ("HOROVOD_ELASTIC", "1", True),
    ("HOROVOD_ELASTIC", "0", False),
    ("HOROVOD_START_TIMEOUT", "0.5", 0.5), ("BAGUA_HVD_TRANSPORT", "TCP", "tcp"), ("_HOROVOD_SECRET_KEY", "YQ==", b"a"),
])
def test_values(name, text, value):
    assert read(name, {name: text}) == value
    assert read(name, {}) == TABLE[name].default


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("HOROVOD_SIZE", "0", "an integer from 1 to 2147483647"), ("HOROVOD_SIZE", "x", "an integer"),
    ("HOROVOD_START_TIMEOUT", "0", "a time in seconds, more than 0"),
    ("HOROVOD_START_TIMEOUT", "nan", "a time in seconds"),
    ("BAGUA_HVD_NCCL", "yes", "one of 0, 1, local"), ("HOROVOD_ELASTIC", "on", "0 or 1"),
])
def test_wrong_values(name, text, expected):
    with pytest.raises(ValueError, match=f"environment variable {name}='{text}': expected {expected}"):
        read(name, {name: text})


def test_a_secret_stays_out_of_the_sentence():
    with pytest.raises(ValueError) as caught:
        read("_HOROVOD_SECRET_KEY", {"_HOROVOD_SECRET_KEY": "hush!"})
    assert str(caught.value) == "environment variable _HOROVOD_SECRET_KEY: expected base64 text"


def test_a_name_that_is_not_in_the_table():
    assert "HOROVOD_NOTHING" not in os.environ
    with pytest.raises(KeyError):
        read("HOROVOD_NOTHING")


def test_baguarun_shows_it():
    done = subprocess.run([sys.executable, "-m", "bagua_hvd.runner.launch", "--help-environment"], capture_output=True,
                          text=True, timeout=60)
    # Lines are wrapped, also after hyphens.
    assert "".join(done.stdout.split()) == "".join(variables.markdown().split())
