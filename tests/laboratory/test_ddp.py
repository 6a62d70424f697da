"""The benchmark of DistributedDataParallel measures every configuration."""
import subprocess
import sys

import pytest

from tests.laboratory import ddp, records

pytest.importorskip("torch")


@pytest.mark.long
def test_every_way_has_a_line():
    done = subprocess.run([sys.executable, "-m", "tests.laboratory.ddp", "--rounds", "1", "--steps", "2"],
                          capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split("|")[1].strip() for line in done.stdout.splitlines()[2:]] == list(ddp.WAYS)


def test_the_table_is_made_of_all_runs(tmp_path):
    for gloo in (0.04, 0.06):
        records.append("ddp", {"hosts": 1}, {way: ("s", [gloo if way == "gloo" else 0.02] * 3) for way in ddp.WAYS},
                       folder=tmp_path)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ddp.table("1", tmp_path).splitlines()]
    assert lines[0][0] == "2 runs"
    assert lines[2:4] == [["DDP over gloo", "40.0 to 60.0", "1.00 to 1.00"],
                          ["DDP over bagua", "20.0 to 20.0", "2.00 to 3.00"]]
    assert ddp.table("2", tmp_path) == "Nothing run yet."
