"""python -m tests.laboratory.model, with the simulator; and bench --negotiation."""
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(240)

from bagua_hvd.core.exceptions import HorovodInternalError  # noqa: E402
from tests.laboratory import model, negotiation  # noqa: E402
from tests.laboratory.simulation import Network  # noqa: E402

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "BAGUA_"))}
NETWORK = Network(1e-3, 125e6)


def test_what_travels_as_codes_takes_a_quarter():
    exact, coded, both = (model.seconds(name, 8, [8 << 20], NETWORK)
                          for name in ("gradient_allreduce", "bytegrad", "low_precision_decentralized"))
    assert coded == pytest.approx(exact / 4, rel=0.15)
    # To the two neighbours of a ring the whole vector is sent once each.
    assert both == pytest.approx(2 * (8 << 20) / 4 / 125e6 * 1514 / 1448, rel=0.1)


def test_what_the_core_does_counts_where_it_is_slower_than_the_line():
    free = model.seconds("bytegrad", 4, [4 << 20], NETWORK)
    slow = model.seconds("bytegrad", 4, [4 << 20], replace(NETWORK, encode_s_per_byte=20e-9))
    assert slow > (4 << 20) * 20e-9 > 2 * free


def test_too_many_steps_at_once_are_simulated_one_after_the_other(monkeypatch):
    each = model.seconds("bytegrad", 8, [1 << 20], NETWORK)
    simulate = model.operations

    def at_most_one(hosts, posted, network):
        if len(posted) > 1:
            raise HorovodInternalError("too many")
        return simulate(hosts, posted, network)

    monkeypatch.setattr(model, "operations", at_most_one)
    assert model.seconds("bytegrad", 8, [1 << 20] * 3, NETWORK) == pytest.approx(3 * each)
    assert model.seconds("bytegrad", 4096, [1 << 20], NETWORK) is None


def test_a_file_of_the_benchmark_is_checked(tmp_path, capsys):
    rows = [{"op": "allreduce", "backend": "bagua", "nbytes": 1 << 20, "min_us": 8900}]
    options = {"hosts": 2, "np": 2, "rate": "1gbit", "algorithm": None}
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"options": options, "rows": rows}))
    assert model.main(["--check", str(file), "--latency", "0"]) == 0
    assert "8.90" in capsys.readouterr().out
    file.write_text(json.dumps({"options": {**options, "np": 4}, "rows": rows}))
    assert model.main(["--check", str(file)]) == 1
    assert "several ranks a host" in capsys.readouterr().err


def test_predictions(capsys):
    assert model.main(["--hosts", "8", "16"]) == 0
    assert capsys.readouterr().out.count("gbit") == 4


def test_limits_of_the_coordinator():
    # 161 tensors of 100 ns and 10 messages of 1000 ns: 26.1 us for each rank and step; a tenth of 100 ms is 10 ms.
    assert model.star_limit(100e-9, 1000e-9, 10) == 383
    assert model.tree_limit(100e-9, 1000e-9, 10) == 611


def bench(*arguments):
    return subprocess.run([sys.executable, "-m", "tests.laboratory", *map(str, arguments)], cwd=ROOT, env=ENVIRONMENT,
                          capture_output=True, text=True, timeout=220)


def test_negotiation_is_measured(tmp_path):
    file = tmp_path / "negotiation.json"
    ended = bench("--negotiation", 2, 3, "--rounds", 1, "--json", file)
    assert ended.returncode == 0, ended.stderr
    assert all(column in ended.stdout for column in negotiation.COLUMNS)
    rows = json.loads(file.read_text())["rows"]
    assert [(row["ranks"], row["names"]) for row in rows] == [(n, names) for n in (2, 3) for names in negotiation.NAMES]
    # A cached tensor is an id, at worst in its own message; a new one is requested in full, with name and shape.
    cached, new, _ = rows[:3]
    assert 0 < cached["control_bytes"] < new["control_bytes"] - 40
    assert all(row["coordinator_ns"] > 0 for row in rows)
    assert model.coordinator_cost(file)[0] == rows[3]["coordinator_ns"] * 1e-9


def test_negotiation_starts_its_own_jobs():
    ended = bench("--negotiation", "--op", "allreduce")
    assert ended.returncode == 2 and "--negotiation is a measurement of its own" in ended.stderr
