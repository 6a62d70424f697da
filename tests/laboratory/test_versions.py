"""tests.laboratory.versions: the table has each job's last run, sorted by version; equal versions share a row."""
from tests.laboratory import records, versions


def test_the_last_run_of_each_job(tmp_path):
    assert versions.table(tmp_path) == "Nothing run yet."
    for job, torch, failed in (("3.11-torch-2.10", "2.10.1", 0), ("3.11-torch-2.4", "2.4.0", 3),
                               ("3.11-torch-2.2", "2.2.0", 2), ("3.11-torch-2.4", "2.4.1", 0)):
        setting = {"job": job, "python": "3.11.7", "torch": torch}
        counts = {"passed": ("1", [50]), "failed": ("1", [failed]), "skipped": ("1", [1])}
        records.append("versions", setting, counts, folder=tmp_path)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in versions.table(tmp_path).splitlines()]
    assert lines[0][1:5] == ["with", "passed", "failed", "skipped"]
    assert [line[:5] for line in lines[2:]] == [["3.11.7", "PyTorch 2.2.0", "50", "2", "1"],
                                                ["3.11.7", "PyTorch 2.4.1, 2.10.1", "50", "0", "1"]]
