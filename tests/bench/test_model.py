"""python -m bagua_hvd.bench.model and bench --negotiation: the model finds the numbers that made its input."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(240)

from bagua_hvd.bench import model, negotiation  # noqa: E402

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "BAGUA_"))}
SIZES = (4, 65536, 1 << 20, 1 << 24)


def file_of(path, hosts, rate, algorithm, made, cores=64):
    crowd = max(1, hosts / cores)
    rows = [{"op": "allreduce", "backend": "bagua", "nbytes": nbytes,
             "min_us": 1e6 * made.seconds(algorithm or "gradient_allreduce", hosts, rate, nbytes, crowd)}
            for nbytes in SIZES]
    path.write_text(json.dumps({"options": {"hosts": hosts, "np": hosts, "rate": rate, "algorithm": algorithm},
                                "machine": {"cores": cores}, "rows": rows}))
    return str(path)


MADE = model.Model(30e-6, 0.1e-9, 0.2e-9)


def test_beta():
    assert model.beta("1gbit") == pytest.approx(8e-9 * 1514 / 1448)
    assert model.beta("100mbit") == pytest.approx(10 * model.beta("1gbit"))


def test_the_fit_finds_the_numbers_that_made_the_times(tmp_path):
    files = [file_of(tmp_path / f"{rate}{algorithm}", 2, rate, algorithm, MADE, cores=1)
             for rate in ("1gbit", "10gbit") for algorithm in (None, "bytegrad")]
    measured = model.measurements(files)
    # One measurement in eight was disturbed.
    disturbed = [(*m[:4], m[4] * (3 if index % 8 == 5 else 1), *m[5:]) for index, m in enumerate(measured)]
    for of in (measured, disturbed):
        found = model.fit(of)
        assert (found.alpha, found.gamma, found.delta) == pytest.approx((MADE.alpha, MADE.gamma, MADE.delta), rel=0.01)
    larger = model.measurements([file_of(tmp_path / "larger", 8, "1gbit", None, MADE, cores=1)])
    assert {cells[-2:] for cells in model.check_cells(found, larger)} <= {("+0 %", "predicted"), ("-0 %", "predicted")}


def test_without_scipy_a_sentence_says_what_to_install(tmp_path, capsys, monkeypatch):
    files = [file_of(tmp_path / f"{algorithm}", 2, "1gbit", algorithm, MADE) for algorithm in (None, "bytegrad")]
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert model.main(["--fit", *files]) == 1
    assert "the fit needs SciPy: pip install 'bagua_hvd[model]'" in capsys.readouterr().err


def test_too_few_files_are_refused(tmp_path, capsys):
    assert model.main(["--fit", file_of(tmp_path / "large", 8, "1gbit", None, MADE)]) == 1
    assert "the fit needs allreduces with 2 hosts" in capsys.readouterr().err


@pytest.mark.parametrize("hosts, nbytes, expected", [
    (2, 4, (1, 4, 4)),                                      # doubling
    (8, 4, (3, 12, 12)),
    (5, 4, (4, 16, 12)),                                    # one rank folds: a hop before and one after
    (4, 1 << 26, (6, 1.5 * (1 << 26), 0.75 * (1 << 26))),   # ring
    (4096, 10 << 20, (24, 2 * 4095 / 4096 * (10 << 20), 4095 / 4096 * (10 << 20))),     # halving
])
def test_work_of_the_chosen_path(hosts, nbytes, expected):
    assert model.allreduce_work(hosts, nbytes) == pytest.approx(expected)


def test_star_limit():
    # 161 tensors of 100 ns and 10 messages of 1000 ns: 26.1 us a rank and step; a tenth of 100 ms is 10 ms.
    assert model.Model(0, 0, 0, 100e-9, 1000e-9).star_limit(10) == 383


def test_the_tree():
    """Beyond 64 hosts rank 0 has 16 children, whatever the number of ranks; each level costs two hops."""
    shapes = {2: (1, 2), 64: (1, 64), 65: (2, 16), 273: (2, 16), 274: (3, 16), 4096: (3, 16)}
    assert {hosts: model.tree(hosts) for hosts in shapes} == shapes
    cost = model.Model(1.0, 0, 0, 100e-9, 1000e-9)
    assert cost.negotiation(64) == pytest.approx(64 * (161 * 100e-9 + 10 * 1000e-9))
    assert cost.negotiation(1024) == pytest.approx(1024 * 161 * 100e-9 + 16 * 10 * 1000e-9)
    star_hops = model.work("decentralized", 1024, 4)[0]
    assert cost.seconds("decentralized", 1024, "1gbit", 4) == pytest.approx(star_hops + 4, abs=1e-3)
    assert cost.tree_limit(10) == 611


def bench(*arguments):
    return subprocess.run([sys.executable, "-m", "bagua_hvd.bench", *map(str, arguments)], cwd=ROOT, env=ENVIRONMENT,
                          capture_output=True, text=True, timeout=220)


def test_negotiation_is_measured(tmp_path):
    file = tmp_path / "negotiation.json"
    ended = bench("--negotiation", 2, 3, "--rounds", 1, "--json", file)
    assert ended.returncode == 0, ended.stderr
    assert all(column in ended.stdout for column in negotiation.COLUMNS)
    rows = json.loads(file.read_text())["rows"]
    assert [(row["ranks"], row["names"]) for row in rows] == [(n, names) for n in (2, 3) for names in negotiation.NAMES]
    # Cached, an announcement of 500 tensors is a few runs of ids; new names are said in full.
    cached, new, _ = rows[:3]
    assert 0 < cached["control_bytes"] < new["control_bytes"] / 5       # with a heartbeat now and then
    assert all(row["coordinator_ns"] > 0 for row in rows)
    assert model.coordinator_cost(file)[0] == rows[3]["coordinator_ns"] * 1e-9


def test_negotiation_starts_its_own_jobs():
    ended = bench("--negotiation", "--op", "allreduce")
    assert ended.returncode == 2 and "--negotiation starts jobs of its own" in ended.stderr
