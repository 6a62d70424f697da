"""A job whose ranks run different versions fails in init() with one sentence, which names both on every rank."""
import re
import shutil
import subprocess
import sys
from pathlib import Path

import bagua_hvd
from bagua_hvd import __version__

OTHER = re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), __version__)     # of the same length
RANK = """
import os, sys
if os.environ["HOROVOD_RANK"] == "1":
    sys.path.insert(0, sys.argv[1])
import bagua_hvd
from bagua_hvd.job import basics
print(os.environ["HOROVOD_RANK"], bagua_hvd.__version__, flush=True)
try:
    basics.init()
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(3)
"""


def other_version(folder):
    """A copy of this package that claims to be another release."""
    package = folder / "bagua_hvd"
    shutil.copytree(Path(bagua_hvd.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    core = next(package.glob("_native*.so"))
    machine_code = core.read_bytes()
    version = f"\0{__version__}\0".encode()
    assert machine_code.count(version) == 1
    core.write_bytes(machine_code.replace(version, f"\0{OTHER}\0".encode()))
    (package / "core" / "version.py").write_text(f'__version__ = "{OTHER}"\n')


def test_both_versions_are_named_on_every_rank(tmp_path):
    other_version(tmp_path / "other")
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    done = subprocess.run([sys.executable, "-m", "bagua_hvd.runner.launch", "-np", "2", sys.executable, program,
                           tmp_path / "other"], capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert f"0 {__version__}\n" in done.stdout and f"1 {OTHER}\n" in done.stdout, done.stdout + done.stderr
    sentence = (rf"rank 0 runs bagua_hvd {re.escape(__version__)} \(protocol \d+\), but rank 1 runs {re.escape(OTHER)} "
                r"\(protocol \d+\): install the same version on every host")
    assert len(re.findall(sentence, done.stdout)) == 2, done.stdout + done.stderr
