"""bench.changing and bench.paired: the evaluation of their records, and both on real emulated hosts."""
import statistics

import pytest

from tests.laboratory import auto, changing, paired, records
from tests.laboratory.hosts import why_impossible

possible = pytest.mark.skipif(bool(why_impossible()), reason=str(why_impossible()))


def record_of(setting, **samples):
    return records.Record("", setting, {name.replace("_", " "): records.Samples("", values)
                                        for name, values in samples.items()}, "", None, {}, "", False)


def test_switches_and_what_each_rate_came_to():
    exact, codes = (list(auto.plans()).index(label) for label in ("gradient_allreduce", "block(8)"))
    used = [exact] * 5 + [codes] * 3
    record = record_of({"steps": 4}, plan_of_rank_0=used, plan_of_rank_1=used,
                       step_of_rank_0=[9, 9, 1, 2, 9, 9, 4, 5], step_of_rank_1=[9, 9, 3, 1, 9, 9, 1, 6])
    assert changing.switches(record) == [(5, "block(8)")] and changing.alike(record)
    assert changing.settled_ms(record, 0) == 2500 and changing.settled_ms(record, 1) == 5000
    other = record_of({"steps": 4}, plan_of_rank_0=used, plan_of_rank_1=[exact] * 6 + [codes] * 2)
    assert not changing.alike(other)


def test_pairs_are_of_one_turn():
    record = record_of({}, **{auto.EXACT: [2.0, 4.0, 1.0], "auto": [2.2, 4.0, 0.9]})
    record.samples[auto.EXACT] = record.samples.pop(auto.EXACT.replace("_", " "))
    assert statistics.median(paired.ratios(record, "auto")) == 1.0
    assert max(paired.ratios(record, "auto")) == pytest.approx(1.1)


@pytest.mark.long
@pytest.mark.timeout(300)
@possible
def test_a_line_that_changes(tmp_path):
    assert changing.main(["--models", "gru", "--rates", "1gbit", "50mbit", "--steps", "40", "--folder",
                          str(tmp_path)]) == 0
    record, = records.read(changing.EXPERIMENT, tmp_path)
    assert changing.alike(record) and changing.plans(record)[0] == auto.EXACT
    assert len(record.samples["step of rank 1"].values) == 80
    assert changing.settled_ms(record, 1) > changing.settled_ms(record, 0)


@pytest.mark.long
@pytest.mark.timeout(300)
@possible
def test_turns(tmp_path, capsys):
    assert paired.main(["--models", "gru", "--turns", "2", "--steps", "3", "--folder", str(tmp_path)]) == 0
    record, = records.read(paired.EXPERIMENT, tmp_path)
    assert [len(samples.values) for samples in record.samples.values()] == [2, 2, 2]
    assert "auto, up to E1" in capsys.readouterr().out
