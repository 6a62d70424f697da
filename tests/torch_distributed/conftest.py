import importlib.util

import pytest

# Without torch there are no tests here.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture
def run_group(run_ranks, tmp_path):
    """run_group(n, function, **arguments): each rank's function gets a file for torch_group.start()."""
    file = str(tmp_path / "store")
    return lambda n, function, **arguments: run_ranks(n, function, arguments={"file": file, **arguments})
