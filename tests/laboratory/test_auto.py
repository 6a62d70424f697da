"""bench.auto: a real pair of emulated hosts, and the page's results from its records."""
import pytest

from tests.laboratory import auto, records, step_times
from tests.laboratory.hosts import why_impossible


def test_every_plan_can_be_pinned_and_is_found_again():
    from bagua_hvd.algorithms import Auto

    for label, (name, size) in auto.plans().items():
        trains, pinned, _ = auto.ways()[label]
        if label == auto.EXACT:             # as users have it, without Auto
            assert (trains, pinned) == (auto.EXACT, {})
        else:
            assert pinned["plan"] == {"algorithm": name, "bucket_bytes": size}
            Auto(**pinned)
        place = list(Auto(up_to=auto.UP_TO).algorithms).index(name)
        record = records.Record(auto.EXPERIMENT, {"way": "auto, up to E1"},
                                {"plan": records.Samples("place, bytes", [place, size or 0])}, "", None, {}, "", False)
        assert auto.chosen(record) == label


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(why_impossible()), reason=str(why_impossible()))
def test_two_hosts(tmp_path, capsys):
    """At 50 Mbit/s a GRU's 11 MB take 1.7 s uncompressed, so every configuration that may uses codecs."""
    command = ["--models", "gru", "--hosts", "2", "--rate", "50mbit", "--ways", auto.EXACT, "auto, up to E1",
               "--seconds", "0.5", "--folder", str(tmp_path)]
    assert auto.main(command) == 0
    found = step_times.newest(auto.EXPERIMENT, tmp_path)        # cells that do not count are tried again
    assert found.keys() == {auto.EXACT, "auto, up to E1"}
    exact, relaxed = found[auto.EXACT], found["auto, up to E1"]
    assert auto.chosen(relaxed).startswith("rotated(2)")
    assert step_times.nbytes(relaxed) < step_times.nbytes(exact) / 3
    assert "rotated(2)" in capsys.readouterr().out
