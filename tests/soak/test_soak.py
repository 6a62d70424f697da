"""A short soak; `make soak` runs the long one."""
import subprocess
import sys
from pathlib import Path

import pytest

OPERATIONS = 2000


@pytest.mark.timeout(240)
def test_soak():
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("soak.py")), str(OPERATIONS), "7"],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=220)
    assert done.returncode == 0, done.stdout
