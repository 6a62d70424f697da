"""Reads the tables of docs/migrating-from-horovod.md."""
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "migrating-from-horovod.md"


def section(title):
    """The text under the heading, up to the next heading of the same or a higher level."""
    text = PAGE.read_text()
    heading = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert heading, f"{PAGE.name} has no section {title!r}"
    rest = text[heading.end():]
    following = re.search(rf"^#{{1,{len(heading[1])}}} ", rest, re.MULTILINE)
    return rest[:following.start()] if following else rest


def table_rows(title):
    """The cells of every row of the section's tables, without heads and rules."""
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        for line in section(title).splitlines() if line.startswith("|")
    ]
    return [cells for cells in rows if cells[0].startswith("`")]


def names(cell):
    """The texts between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def absent_names():
    """The names, as in horovod_api.py, that the page lists as missing."""
    return [name for cells in table_rows("Names that are not there") for name in names(cells[0])]


def variables():
    """Environment variable -> status, for those that act differently from Horovod."""
    return {name: cells[1] for cells in table_rows("Environment variables") for name in names(cells[0])}
