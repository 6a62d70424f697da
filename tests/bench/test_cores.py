import os

import pytest

from bagua_hvd.bench import cores

pytestmark = pytest.mark.timeout(60)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_round_trip_takes_as_long_as_caches_and_schedulers_let_it():
    allowed = os.sched_getaffinity(0)
    assert 5 < cores.round_trip_ns() < 1e9
    assert os.sched_getaffinity(0) == allowed       # only the threads that measured stay on a core


def test_one_core_has_no_distance(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert cores.round_trip_ns() is None
