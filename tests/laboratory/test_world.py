"""python -m tests.laboratory.world starts the given ranks, and prints its results."""
import re

import pytest

from tests.laboratory import world

pytestmark = pytest.mark.timeout(120)


def test_tables(capsys):
    assert world.main(["--ranks", "2", "3", "--pair", "2", "4", "--members", "2", "3", "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\n\| +3 \| +\d+\.\d\d \|", printed)
    assert re.search(r"3 ranks, 2 steps: descriptors / rank \d+", printed)
    assert "| 0 and 1 |" in printed and "| 2 and 3 |" in printed


def test_exponent():
    assert world.exponent([16, 32, 64], [1, 2 ** 1.5, 8]) == pytest.approx(1.5)
