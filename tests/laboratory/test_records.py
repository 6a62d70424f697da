"""tests.laboratory.records: appended records can be read, and the documentation agrees with the records."""
import re
import sys
import types

from tests.laboratory import records


def test_what_is_appended_is_read_back(tmp_path):
    for hosts, seconds in ((2, [0.5, 0.25]), (4, [1.0])):
        records.append("trial", {"hosts": hosts, "rate": "1gbit"}, {"step": ("s", seconds)}, folder=tmp_path)
    first, second = records.read("trial", tmp_path, rate="1gbit")
    assert first.samples == {"step": records.Samples("s", [0.5, 0.25])}
    assert records.read("trial", tmp_path, hosts=4) == [second]
    assert records.read("trial", tmp_path, hosts=8) == records.read("trial", tmp_path, peers=2) == []
    assert records.read("another", tmp_path) == []
    assert first.shared and first.command and first.machine["cores"] and first.machine["memory_gib"]


def test_what_was_measured_under_an_earlier_name_counts(tmp_path):
    records.append("trial", {"algorithm": "streaming_diloco", "way": "streaming_diloco"}, {}, folder=tmp_path)
    record, = records.read("trial", tmp_path, algorithm="diloco")
    assert record.setting == {"algorithm": "diloco", "way": "streaming_diloco"}
    assert "streaming_diloco" in (tmp_path / "trial.jsonl").read_text()         # the file is never edited


def test_a_part_is_made_from_records(tmp_path, monkeypatch):
    module = types.ModuleType("tests.laboratory.trial")
    module.figure = lambda times: str(2 * int(times))
    module.table = lambda: "| a |\n|---|\n| 1 |"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("It is <!-- from trial.figure times=4 -->?<!-- end --> times.\n"
                    "<!-- from trial.table -->\nold\n<!-- end -->\n")
    (old, new), = records.pages(tmp_path).values()
    assert old == page.read_text()
    assert new == ("It is <!-- from trial.figure times=4 -->8<!-- end --> times.\n"
                   "<!-- from trial.table -->\n| a |\n|---|\n| 1 |\n<!-- end -->\n")


def test_the_documentation_says_what_the_records_give():
    differing = [str(path) for path, (old, new) in records.pages().items() if old != new]
    assert not differing, "run `python -m tests.laboratory.records`"


def test_no_sentence_begins_its_line_with_a_comment():
    """CommonMark ends the paragraph there, and shows the rest of the line as HTML."""
    root = records.ROOT
    lines = [f"{path.relative_to(root)}:{number}" for path in [root / "README.md", *root.glob("docs/**/*.md")]
             for number, line in enumerate(path.read_text().splitlines(), 1)
             if re.match(r"\s*<!--.*?-->\s*\S", line)]
    assert not lines, "move the comment into the line, behind a word"
