"""The demo, shortened, and what its picture shows."""
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


def test_shows_both_algorithms(demo, capsys):
    demo.main(epochs=3)
    lines = capsys.readouterr().out.splitlines()
    exact, bytegrad = (next(line.split() for line in lines if line.startswith(name)) for name in demo.ALGORITHMS)
    assert float(exact[1]) > 80 and float(bytegrad[1]) > 80
    assert 3 < int(exact[4].replace(",", "")) / int(bytegrad[4].replace(",", "")) < 5
    assert any("loss over 69 steps" in line for line in lines)


def test_draws_falling_curves_from_corner_to_corner(demo):
    losses = {name: {"losses": [math.exp(-i / 30) * (1 + j) for i in range(256)]} for j, name in enumerate("ab")}
    rows = [line.partition("|")[2] for line in demo.picture(losses) if "|" in line]
    assert len(rows) == demo.HEIGHT
    assert rows[0][0] == "o" and rows[-1].rstrip()[-1] == "*" and len(rows[-1]) == demo.WIDTH
