import importlib.util

import pytest

from bagua_hvd.job import basics

# Without torch nothing can be tested here.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture
def job(monkeypatch):
    """job(rank, size): the rank and the size that samplers see."""

    def set_place(rank, size):
        monkeypatch.setattr(basics, "rank", lambda: rank)
        monkeypatch.setattr(basics, "size", lambda: size)

    return set_place
