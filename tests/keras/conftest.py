import functools
import importlib.util

import pytest

# Without Keras nothing can be tested here.
collect_ignore_glob = [] if importlib.util.find_spec("keras") and importlib.util.find_spec("tensorflow") else ["test_*"]


@pytest.fixture
def run_ranks(run_ranks):
    """As in other folders, but ranks start with TensorFlow, and with it Keras, imported."""
    return functools.partial(run_ranks, framework="tensorflow")
