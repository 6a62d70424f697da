"""The comparison of algorithms, shortened: its table and picture, and that what it trains learns."""
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

EXAMPLE = Path(__file__).parents[2] / "examples" / "convergence.py"


@pytest.mark.timeout(240)
def test_table_and_picture(run_ranks, tmp_path):
    folder = tmp_path / "convergence"
    run_ranks(2, EXAMPLE, timeout=220, arguments=[
        "--algorithms", "bytegrad", "qadam", "decentralized", "--seeds", "1", "--epochs", "6", "--steps", "4",
        "--output", str(folder),
    ])
    rows = json.loads((folder / "convergence.json").read_text())
    assert {(row["task"], row["optimizer"], row["algorithm"]) for row in rows} == {
        ("digits", "sgd", "gradient_allreduce"), ("digits", "sgd", "bytegrad"), ("digits", "sgd", "decentralized"),
        ("digits", "adam", "gradient_allreduce"), ("digits", "adam", "qadam"),
        ("characters", "sgd", "gradient_allreduce"),
        *(("characters", "adam", name) for name in ("gradient_allreduce", "bytegrad", "qadam", "decentralized")),
    }
    assert all(row["result"] > 70 for row in rows if row["task"] == "digits")
    table = (folder / "convergence.md").read_text()
    assert table.count("\n| ") == len(rows) + 2
    assert (folder / "convergence.png").stat().st_size > 10_000
