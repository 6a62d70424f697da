import importlib.util

import pytest

from bagua_hvd.job import basics

# Without torch there is nothing to test here.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture
def job(monkeypatch):
    """job(rank, size): what samplers see as their place."""

    def set_place(rank, size):
        monkeypatch.setattr(basics, "rank", lambda: rank)
        monkeypatch.setattr(basics, "size", lambda: size)

    return set_place
