"""The benchmark of tensor parallelism's allreduce measures both backends."""
import subprocess
import sys

import pytest

from tests.laboratory import records, tensor_parallel

pytest.importorskip("torch")


def test_every_size_has_a_line(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
                           "tests.laboratory.tensor_parallel", "--turns", "1", "--calls", "3"],
                          capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")]
    assert lines[2:] == list(tensor_parallel.SIZES)


def test_the_table_is_the_newest_records(tmp_path):
    assert tensor_parallel.table(tmp_path) == "Nothing run yet."
    for factor in (9, 50):
        samples = {f"{backend} {size}": ("s", [1e-5 * (factor if backend == "gloo" else 1)] * 3)
                   for backend in tensor_parallel.BACKENDS for size in tensor_parallel.SIZES}
        records.append("tensor_parallel", {"ranks": 2}, samples, folder=tmp_path)
    cells = [cell.strip() for cell in tensor_parallel.table(tmp_path).splitlines()[2].split("|")[1:-1]]
    assert cells == ["32 KiB", "10", "500", "50x"]
