"""The example, and PyTorch's own launcher for Spark, which uses no code of ours."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="Spark is not installed: pip install pyspark pyarrow pandas")

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("spark")]
ROOT = Path(__file__).parents[2]


def test_keras_digits(spark, tmp_path):
    pytest.importorskip("tensorflow")
    pytest.importorskip("sklearn")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYSPARK_PYTHON": sys.executable,
                   "PYSPARK_SUBMIT_ARGS": "--master local[2] --conf spark.ui.enabled=false pyspark-shell"}
    done = subprocess.run([sys.executable, str(ROOT / "examples/spark_keras_digits.py"), "--algorithm", "bytegrad"],
                          capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    ranks, accuracy = re.search(r"(\d) ranks, test accuracy: ([\d.]+) %", done.stdout).groups()
    assert ranks == "2" and float(accuracy) >= 88


def test_torch_distributor(spark):
    pytest.importorskip("torch")
    from pyspark.ml.torch.distributor import TorchDistributor

    def main():
        import torch

        import bagua_hvd.torch as hvd

        hvd.init()
        return hvd.size(), hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum).item()

    assert TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(main) == (2, 3.0)
