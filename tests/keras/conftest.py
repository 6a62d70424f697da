import functools
import importlib.util

import pytest

# Without Keras there is nothing to test here.
collect_ignore_glob = [] if importlib.util.find_spec("keras") and importlib.util.find_spec("tensorflow") else ["test_*"]


@pytest.fixture
def run_ranks(run_ranks):
    """As elsewhere; the ranks find TensorFlow, and with it Keras, imported."""
    return functools.partial(run_ranks, framework="tensorflow")
