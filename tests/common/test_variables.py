"""The table of environment variables: complete, equal to its page, and the only reader."""
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
# Measuring has variables of its own between its processes, and reports every setting that begins so.
FILES = [path for path in PACKAGE.rglob("*.py") if "bench" not in path.parts and path.name != "variables.py"]


def test_the_page_is_the_table():
    assert (ROOT / "docs" / "environment.md").read_text() == variables.markdown()


def test_every_name_in_the_code_is_in_the_table():
    assert {name for path in FILES for name in OURS.findall(path.read_text())} - TABLE.keys() == set()


def test_nothing_else_reads_them():
    reads = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\()["']_?(?:HOROVOD|BAGUA)_\w+["'](?!\] =)""")
    found = [f"{path.relative_to(ROOT)}: {match}" for path in FILES for match in reads.findall(path.read_text())]
    assert found == []
    core = (ROOT / "native").rglob("*.[ch]")        # reads no variable at all
    assert [path for path in core if re.search(r"getenv|\benviron\b", path.read_text())] == []


def test_what_is_said_to_have_an_effect_is_read():
    texts = {path: path.read_text() for path in FILES if path.name != "config_parser.py"}
    unread = [name for name, variable in TABLE.items() if variable.setter != "none"
              and not any(f'"{name}"' in text for text in texts.values())]
    assert unread == []


TRACED = """
import os, sys
class Traced(dict):
    seen = set()
    def get(self, name, default=None): self.seen.add(name); return super().get(name, default)
    def __getitem__(self, name): self.seen.add(name); return super().__getitem__(name)
    def __contains__(self, name): self.seen.add(name); return super().__contains__(name)
real, os.environ = os.environ, Traced(os.environ)
import bagua_hvd.torch as hvd, torch
hvd.init()
model = torch.nn.Linear(2, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
hvd.allreduce(torch.ones(2))
print(*sorted(name for name in Traced.seen if "HOROVOD" in name or "BAGUA" in name))
"""


def test_what_a_job_reads_is_in_the_table():
    done = subprocess.run([sys.executable, "-m", "bagua_hvd.runner.launch", "-np", "2", sys.executable, "-c", TRACED],
                          capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    names = set(re.findall(r"_?(?:HOROVOD|BAGUA)_[A-Z0-9_]+", done.stdout))
    assert {"HOROVOD_RANK", "BAGUA_ALGORITHM", "HOROVOD_START_TIMEOUT"} <= names <= TABLE.keys()


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
    assert done.stdout.split() == variables.markdown().split()
