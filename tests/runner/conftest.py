import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launcher import Launcher  # noqa: E402


@pytest.fixture
def launcher(tmp_path):
    """A Launcher; the test fails when a process is left behind."""
    # A test run in the background of a script has SIGINT ignored, and would hand that down.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    result = Launcher(tmp_path)
    try:
        yield result
    finally:
        left = result.close()
        signal.signal(signal.SIGINT, previous)
    assert not left, f"processes left behind: {left}"
