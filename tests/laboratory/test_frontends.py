"""The benchmark of front ends runs, and its table has a line for each."""
import subprocess
import sys

import pytest

from tests.laboratory import exposed


@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.parametrize("ways", [
    ["graph"], pytest.param(["torch", "graph"], marks=pytest.mark.long)], ids=["some", "all"])
def test_table(ways):
    pytest.importorskip("tensorflow")
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "tests.laboratory.frontends", "--divide", "4096", "--steps", "2", "--rounds", "1",
         "--ways", *ways],
        capture_output=True, text=True, timeout=280,
    )
    assert done.returncode == 0, done.stderr
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line]
    assert lines[0][0] == "front end"
    by_way = {way: [float(cell) for cell in cells] for way, *cells, _ in lines[2:]}
    assert set(by_way) == set(ways)
    for steps, alone, distributed, _, exposed_ms, _ in by_way.values():
        assert steps > 0 and alone > 0 and 0 <= exposed_ms < distributed


def test_exposed():
    def named(pid, name):
        return {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}

    def event(pid, ph, ts):
        return {"pid": pid, "ph": ph, "ts": ts, "name": "ALLREDUCE"}

    events = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 1000}},
        named(1, "gradients.0.0"), event(1, "B", 10), named(2, "allreduce.row"), event(2, "B", 11), event(1, "E", 12),
        event(1, "B", 14), event(1, "B", 15), event(1, "E", 18), {"name": "CYCLE_START", "ph": "i", "pid": 0, "ts": 18},
        event(1, "E", 20), event(2, "E", 90),
    ]
    assert exposed.bars(events) == [(1010, 1012), (1014, 1020)]
    assert exposed.union([(5, 7), (1, 3), (2, 4), (7, 8)]) == [(1, 4), (5, 8)]
    assert exposed.overlap(exposed.bars(events), [(1000, 1011), (1016, 1030), (1019, 1040)]) == 1 + 4
    assert exposed.overlap([], [(1, 2)]) == 0
