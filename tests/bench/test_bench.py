"""python -m bagua_hvd.bench: values, format and failures, but no times."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(240)

from bagua_hvd.bench import __main__ as bench  # noqa: E402
from bagua_hvd.bench import report  # noqa: E402
from bagua_hvd.bench.rank import (  # noqa: E402
    OPS,
    Case,
    Checker,
    WrongResult,
    cases,
    plan,
    resnet50_counts,
)
from bagua_hvd.bench.rounds import slowest  # noqa: E402

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "BAGUA_"))}


def run(*command, env=None):
    return subprocess.run([sys.executable, "-m", *map(str, command)], cwd=ROOT, env={**ENVIRONMENT, **(env or {})},
                          capture_output=True, text=True, timeout=200)


def rows_of(stdout):
    """The table's cells, header first."""
    lines = [line for line in stdout.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


def left_behind(path):
    """Ranks and launchers of the run that wrote to `path`, as far as they still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"BENCH_TEST={path}".encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
        except OSError:
            pass
    return found


def test_table_and_json(tmp_path):
    file = tmp_path / "bench.json"
    ended = run("bagua_hvd.bench", "--sizes", "4,1K", "--backends", "bagua,gloo", "--rounds", 1, "--iterations", 4,
                "--json", file, env={"BENCH_TEST": str(tmp_path)})
    assert ended.returncode == 0, ended.stderr
    assert not left_behind(tmp_path)
    facts = ended.stdout.splitlines()[0]
    assert " cores of " in facts and "torch " in facts and "bagua_hvd " in facts
    header, *lines = rows_of(ended.stdout)
    assert header == list(report.COLUMNS)
    assert [line[:3] for line in lines] == [["allreduce", size, backend]
                                            for size in ("4 B", "1 KiB") for backend in ("bagua", "gloo")]
    written = json.loads(file.read_text())
    assert written["machine"]["cores"] >= 1 and written["options"]["np"] == 2
    assert [row["nbytes"] for row in written["rows"]] == [4, 4, 1024, 1024]
    for row, beside in zip(written["rows"], [1, 1, 3, 3], strict=True):
        samples = row["samples_us"][0]
        assert row["min_us"] == min(samples) and row["max_us"] == max(samples) and len(samples) == 1
        assert row["algbw_gbs"] == pytest.approx(row["nbytes"] / row["median_us"] / 1e3)
        assert row["busbw_gbs"] == pytest.approx(row["algbw_gbs"])          # 2 (n-1)/n = 1 for n = 2
        assert row["vs_gloo"] == pytest.approx(written["rows"][beside]["median_us"] / row["median_us"])


def test_in_a_running_job_every_op_is_checked():
    ended = run("bagua_hvd.runner.launch", "-np", 2, sys.executable, "-m", "bagua_hvd.bench", "--sizes", "20", "--op",
                *OPS, "--rounds", 1, "--iterations", 2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("every result was checked") == 1
    for op in OPS:
        assert f"| {op} " in ended.stdout


def test_failing_rank_is_one_message_and_leaves_nothing(tmp_path):
    ended = run("bagua_hvd.bench", "--backends", "bagua", "--sizes", "4", "--rounds", 1,
                env={"BAGUA_HVD_TRANSPORT": "pigeon", "BENCH_TEST": str(tmp_path)})
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert "bench: error: bagua: rank" in ended.stderr and "BAGUA_HVD_TRANSPORT='pigeon'" in ended.stderr
    assert not rows_of(ended.stdout)
    assert not left_behind(tmp_path)


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--op", "allsum"], "--op: 'allsum' is unknown; choose from allreduce"),
    (["--sizes", "4,1X"], "--sizes: '1X' is not a number of bytes"),
    (["--sizes", "0"], "--sizes: '0' is not"),
    (["--backends", "nccl"], "--backends: 'nccl' is unknown; choose from bagua, gloo, mpi"),
    (["--backends", ","], "--backends names nothing"),
    (["-n", "0"], "'0' is not a whole number from 1 on"),
    (["--dtype", "int7"], "invalid choice: 'int7'"),
    (["--algorithm", "bytegrad", "--dtype", "int32"], "--algorithm bytegrad does not take int32"),
    (["--algorithm", "bytegrad", "--op", "broadcast"], "--algorithm is for allreduce only"),
    (["--algorithm", "bytegrab"], "Did you mean 'bytegrad'?"),
    (["--json", "/nonexistent/file.json"], "cannot be written"),
])
def test_bad_options(arguments, sentence, capsys, monkeypatch):
    monkeypatch.delenv("HOROVOD_SIZE", raising=False)
    with pytest.raises(SystemExit) as ended:
        bench.parse_options(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_options_of_a_job(capsys, monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    assert bench.parse_options([]).np == 4
    assert bench.parse_options([]).backends == ["bagua"]
    for arguments, sentence in ((["-n", "2"], "this is a job of 4 ranks"), (["--backends", "mpi"], "not in a running")):
        with pytest.raises(SystemExit):
            bench.parse_options(arguments)
        assert sentence in capsys.readouterr().err


def test_sizes_are_rounded_up_to_rows_for_every_rank(monkeypatch):
    monkeypatch.delenv("HOROVOD_SIZE", raising=False)
    options = bench.parse_options(["-n", "3", "--op", "allreduce", "allgather", "--sizes", "4,1K,13"])
    assert cases(options, 3) == [Case("allreduce", 1, 4), Case("allreduce", 256, 1024), Case("allreduce", 4, 16),
                                 Case("allgather", 3, 12), Case("allgather", 258, 1032), Case("allgather", 6, 24)]
    assert cases(bench.parse_options(["--many"]), 2) == [Case("many", 25557032, 4 * 25557032)]
    assert len(resnet50_counts()) == 161


def test_plan():
    assert plan(4, None, 100) == (20, 25)
    assert plan(4, 30, 100) == (2, 25)
    assert plan(4, 3, 100) == (1, 3)
    assert plan(4, 10, 4) == (3, 4)
    assert plan(1 << 30, None, 100) == (5, 1)


@pytest.mark.parametrize(("op", "size", "factor"), [
    ("allreduce", 4, 1.5), ("many", 4, 1.5), ("broadcast", 4, 1.0), ("allgather", 4, 0.75), ("alltoall", 4, 0.75),
    ("reducescatter", 4, 0.75), ("allreduce", 1, 0.0),
])
def test_bus_factor(op, size, factor):
    assert report.bus_factor(op, size) == factor


def test_a_sample_is_the_slowest_ranks():
    assert slowest([{"a/4": [1.0, 5.0]}, {"a/4": [2.0, 3.0]}]) == {"a/4": [2.0, 5.0]}


def test_rows_without_gloo_have_no_ratio():
    [row] = report.rows({"bagua": {"allreduce/4": [[1e-6, 3e-6], [2e-6]]}}, [Case("allreduce", 1, 4)], 2)
    assert (row.median_us, row.min_us, row.max_us) == pytest.approx((2, 1, 3))
    assert row.vs_gloo is None and row.cells()[-1] == "-"


def test_checker_expects_what_the_definitions_say():
    """Expected results, by hand for two ranks with the inputs 1 2 3 4 and 2 3 4 5."""
    import torch

    expected = {"allreduce": [3, 5, 7, 9], "broadcast": [1, 2, 3, 4], "allgather": [1, 2, 2, 3],
                "alltoall": [3, 4, 4, 5], "reducescatter": [7, 9]}
    for op, values in expected.items():
        checks = Checker(1, 2, "float32")
        checks.check(op, 4, torch.tensor(values, dtype=torch.float32))
        values[-1] += 1
        with pytest.raises(WrongResult, match=rf"{op} of .*: element {len(values) - 1} is {values[-1]}.0, expected"):
            checks.check(op, 4, torch.tensor(values, dtype=torch.float32))
        with pytest.raises(WrongResult, match="NaN|nan"):
            checks.check(op, 4, torch.full((len(values),), torch.nan))
        with pytest.raises(WrongResult, match="shape"):
            checks.check(op, 4, torch.tensor(values[1:], dtype=torch.float32))


def test_checker_grants_a_codec_its_error_and_no_more():
    import torch

    checks = Checker(0, 2, "float32", relaxed=True)
    # |D(Q(x)) - x| <= range / 510, for two ranks with range 6, then for their sum with range 12.
    bound = (2 * 6 + 12) / 510
    checks.check("allreduce", 3, torch.tensor([3.0, 5.0, 7.0]) + bound)
    with pytest.raises(WrongResult):
        checks.check("allreduce", 3, torch.tensor([3.0, 5.0, 7.0]) + 1.1 * bound)
