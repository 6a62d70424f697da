"""The demo, shortened, and the contents of its picture."""
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import demo

    yield demo
    del sys.modules["demo"]


def test_shows_three_algorithms(demo, capsys):
    demo.main(steps=40, mbits=1000)
    lines = capsys.readouterr().out.splitlines()
    rows = [next(line for line in lines if line.startswith(name) and line.endswith(tuple("0123456789"))).split()
            for name in demo.ALGORITHMS]
    assert all(float(row[-3]) > 80 for row in rows)
    exact, *fewer = (int(row[-1].replace(",", "")) for row in rows)
    assert [round(exact / nbytes) for nbytes in fewer] == [4, 15]
    assert sum("40 steps in" in line for line in lines) == 3


def test_draws_falling_curves_over_the_seconds(demo):
    losses = [math.exp(-i / 30) for i in range(256)]
    results = {name: {"losses": losses, "seconds": [(i + 1) / rate for i in range(256)]}
               for name, rate in zip(demo.ALGORITHMS, (1, 2, 4), strict=True)}
    rows = [line.partition("|")[2] for line in demo.picture(results) if "|" in line]
    assert len(rows) == demo.HEIGHT and len(rows[-1]) == demo.WIDTH
    assert rows[0][0] == "#" and [rows[-1].rindex(mark) for mark in "*o+"] == [63, 32, 16]
