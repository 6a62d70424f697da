import os
from types import SimpleNamespace

import pytest

from bagua_hvd.bench import rounds
from tests.laboratory import cores
from tests.laboratory.__main__ import guard

pytestmark = pytest.mark.timeout(60)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_round_trip_takes_as_long_as_caches_and_schedulers_let_it():
    allowed = os.sched_getaffinity(0)
    assert 5 < cores.round_trip_ns() < 1e9
    assert os.sched_getaffinity(0) == allowed       # only the measuring threads stay on a core


def test_one_core_has_no_distance(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert cores.round_trip_ns() is None


def test_a_round_that_was_moved_apart_is_repeated(monkeypatch):
    measured = iter([50] * 10 + [50] * 5 + [300] * 5 + [300] * 5 + [60] * 10)
    monkeypatch.setattr(cores, "round_trip_ns", lambda: next(measured))
    monkeypatch.setattr(cores.time, "sleep", lambda seconds: None)
    near, runs = cores.Nearness(), []
    for number in range(2):
        near(lambda number=number: runs.append(number))
    assert runs == [0, 1, 1]
    assert next(measured, None) is None


def test_cores_that_stay_apart_do_not_stop_a_measurement(monkeypatch):
    distances = iter([50] * 10)
    monkeypatch.setattr(cores, "round_trip_ns", lambda: next(distances, 300))
    monkeypatch.setattr(cores, "PATIENCE_SECONDS", 0)
    near, runs = cores.Nearness(), []
    for number in range(2):
        assert near(lambda number=number: runs.append(number) or number) == number
    assert runs == [0] + [1] * cores.REPEATED


@pytest.mark.parametrize("hosts", [None, 2])
def test_rounds_are_repeated_on_one_host_alone(monkeypatch, hosts):
    """They are not repeated in a job, whose ranks measure together: the laboratory rejects that (test_hosts.py)."""
    distances = iter([50] * 5 + [300] * 5)
    monkeypatch.setattr(cores, "round_trip_ns", lambda: next(distances, 50))
    monkeypatch.setattr(cores, "PATIENCE_SECONDS", 0)
    options, runs = SimpleNamespace(hosts=hosts, rounds=1), []
    results, others = rounds.interleaved(["bagua"], options, lambda name: runs.append(name) or {"case": [1.0]},
                                         guard(options))
    assert len(runs) == (1 if hosts else 2)
    assert results == {"bagua": {"case": [[1.0]]}} and len(others["bagua"]) == 1
