"""What docs/migrating-from-horovod.md says in its tables."""
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "migrating-from-horovod.md"


def section(title):
    """The text under the heading, down to the next of its level or above."""
    text = PAGE.read_text()
    heading = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert heading, f"{PAGE.name} has no section {title!r}"
    rest = text[heading.end():]
    following = re.search(rf"^#{{1,{len(heading[1])}}} ", rest, re.MULTILINE)
    return rest[:following.start()] if following else rest


def table_rows(title):
    """The cells of every row of the section's tables, heads and rules left out."""
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        for line in section(title).splitlines() if line.startswith("|")
    ]
    return [cells for cells in rows if cells[0].startswith("`")]


def names(cell):
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def absent_names():
    """The names, as in horovod_api.py, that the page says are not there."""
    return [name for cells in table_rows("Names that are not there") for name in names(cells[0])]


def variables():
    """Environment variable -> status, of those that do not do what they do in Horovod."""
    return {name: cells[1] for cells in table_rows("Environment variables") for name in names(cells[0])}
