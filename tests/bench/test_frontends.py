"""The benchmark of front ends runs, and its table has a line for each."""
import subprocess
import sys

import pytest


def test_table():
    pytest.importorskip("tensorflow")
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "bagua_hvd.bench.frontends", "--divide", "4096", "--steps", "2", "--rounds", "1",
         "--ways", "torch", "graph"],
        capture_output=True, text=True, timeout=110,
    )
    assert done.returncode == 0, done.stderr
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line]
    assert lines[0][0] == "front end"
    by_way = {way: [float(cell.rstrip("%")) for cell in cells] for way, *cells in lines[2:]}
    assert set(by_way) == {"torch", "graph"}
    for steps, alone, distributed, *_ in by_way.values():
        assert steps > 0 and alone > 0 and distributed > 0
    assert by_way["torch"][-1] == 100
