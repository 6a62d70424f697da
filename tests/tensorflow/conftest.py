import importlib.util

import pytest

import ranks

# Without TensorFlow nothing can be tested here.
collect_ignore_glob = [] if importlib.util.find_spec("tensorflow") else ["test_*.py"]


@pytest.fixture
def run_ranks(tmp_path):
    """ranks.run_ranks in a separate folder per test, in processes that have imported TensorFlow."""
    return lambda n, function, **options: ranks.run_ranks(tmp_path, n, function, framework="tensorflow", **options)
