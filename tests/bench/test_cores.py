import os
from types import SimpleNamespace

import pytest

from bagua_hvd.bench import cores, rounds

pytestmark = pytest.mark.timeout(60)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_round_trip_takes_as_long_as_caches_and_schedulers_let_it():
    allowed = os.sched_getaffinity(0)
    assert 5 < cores.round_trip_ns() < 1e9
    assert os.sched_getaffinity(0) == allowed       # only the threads that measured stay on a core


def test_one_core_has_no_distance(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert cores.round_trip_ns() is None


def test_a_round_that_was_moved_apart_is_repeated(monkeypatch):
    measured = iter([50] * 10 + [50] * 5 + [300] * 5 + [300] * 5 + [60] * 10)
    monkeypatch.setattr(cores, "round_trip_ns", lambda: next(measured))
    monkeypatch.setattr(rounds.time, "sleep", lambda seconds: None)
    near, runs = rounds._Nearness(), []
    for number in range(2):
        near.run(lambda number=number: runs.append(number))
    assert runs == [0, 1, 1]
    assert next(measured, None) is None


def test_cores_that_stay_apart_do_not_stop_a_measurement(monkeypatch):
    distances = iter([50] * 10)
    monkeypatch.setattr(cores, "round_trip_ns", lambda: next(distances, 300))
    monkeypatch.setattr(rounds, "PATIENCE_SECONDS", 0)
    near, runs = rounds._Nearness(), []
    for number in range(2):
        assert near.run(lambda number=number: runs.append(number) or number) == number
    assert runs == [0] + [1] * rounds.REPEATED


@pytest.mark.parametrize("hosts, job", [(None, False), (2, False), (None, True)])
def test_only_who_starts_the_ranks_repeats_a_round(monkeypatch, hosts, job):
    """In a job every rank measures with the others: one that began again by itself would wait for them for ever."""
    distances = iter([50] * 5 + [300] * 5)
    monkeypatch.setattr(cores, "round_trip_ns", lambda: next(distances, 50))
    monkeypatch.setattr(rounds, "PATIENCE_SECONDS", 0)
    monkeypatch.delenv("HOROVOD_SIZE", raising=False)
    if job:
        monkeypatch.setenv("HOROVOD_SIZE", "2")
    runs = []
    results, others = rounds.interleaved(["bagua"], SimpleNamespace(hosts=hosts, rounds=1),
                                         lambda name: runs.append(name) or {"case": [1.0]})
    assert len(runs) == (2 if not hosts and not job else 1)
    assert results == {"bagua": {"case": [[1.0]]}} and len(others["bagua"]) == 1
