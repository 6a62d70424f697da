"""The benchmark of the codecs runs for every codec, and records its output; the figures depend on the machine."""
import subprocess
import sys

from tests.laboratory import codecs, records


def test_every_codec_has_its_line_and_its_record(tmp_path, monkeypatch):
    command = [sys.executable, "-m", "tests.laboratory.codecs", "--mib", "1", "--rounds", "2", "--record"]
    command += ["--folder", tmp_path]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line[:27].rstrip() for line in lines[2:]] == list(codecs.CODECS)
    assert all(float(figure.rstrip("%")) > 0 for line in lines[2:] for figure in line[27:].split())

    record, = records.read("codecs", tmp_path)
    assert {len(record.samples[f"{name}: {what}"].values) for name in codecs.CODECS for what in codecs.TIMED} == {2}
    monkeypatch.setattr(records, "read", lambda experiment: [record])
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in codecs.speeds().splitlines()[2:]]
    assert table == [[f"`{line[:27].rstrip()}`", *line[27:].split()[:4]] for line in lines[2:]]
