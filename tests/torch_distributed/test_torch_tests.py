"""Some of torch's own backend tests. torch_tests.py runs them all; results are in docs/results/measurements.md."""
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "torch_tests.py"
# Short ones, covering every kind.
NAMES = ["test_all_gather_group", "test_all_reduce_product", "test_reduce_scatter_tensor", "test_gather_full_group",
         "test_isend", "test_send_recv_any_source", "test_barrier_timeout_global", "test_new_subgroups_overlap",
         "test_ddp_comm_hook_logging",
         "test_broadcast_object_list", "test_sparse_all_reduce_sum", "test_get_backend"]


@pytest.mark.skipif(not importlib.util.find_spec("expecttest"),
                    reason="torch's tests need the package expecttest")
@pytest.mark.long
def test_some_of_torchs_tests():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--ranks", "2", "-k", ",".join(NAMES), "--seconds", "60"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("\npassed") + done.stdout.startswith("passed") >= 10, done.stdout
