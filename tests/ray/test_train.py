"""Ray Train: the examples with TorchTrainer and BaguaConfig, and Ray's V1 HorovodTrainer with our Coordinator."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="Ray is not installed: pip install 'ray[train]'")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(local_ray):
    """Returns a function that runs a Python program on the Ray that all tests share."""
    def run(*command, **variables):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": local_ray, **variables}
        result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=500,
                                env=environment)
        assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
        return result.stdout

    return run


@pytest.mark.parametrize("framework, algorithm", [("torch", "bytegrad"), ("keras", "gradient_allreduce")])
def test_example(run, framework, algorithm, tmp_path):
    if framework == "keras":
        pytest.importorskip("tensorflow")
    output = run(str(ROOT / f"examples/ray_{framework}_digits.py"), "--algorithm", algorithm, "--storage",
                 str(tmp_path))
    ranks, accuracy = re.search(r"(\d) ranks, test accuracy: ([\d.]+) %", output).groups()
    assert ranks == "2" and float(accuracy) >= 88


def test_code_of_the_page(run, tmp_path):
    pytest.importorskip("tensorflow")
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs/ray.md").read_text(), re.DOTALL))
    code = code.replace("num_workers=4)).fit()", "num_workers=2), run_config=ray.train.RunConfig(storage_path="
                        f"'{tmp_path}')).fit()")
    code = code.replace("num_workers=4", "num_workers=2").replace("timeout_s=30", "timeout_s=300")
    code = code.replace("    model = prepare_model(", "    assert torch.distributed.get_backend() == 'bagua'\n"
                        "    model = prepare_model(")
    output = run("-c", f"import ray\n{code}\nprint(results)")
    assert "[(0, 3), (1, 3)]" in output.splitlines()        # the ranks' output may arrive later


def test_rays_horovod_trainer_of_v1(run, tmp_path):
    code = """
import bagua_hvd.as_horovod
import os
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.horovod import HorovodTrainer

def train():
    import horovod.torch as hvd
    import torch
    hvd.init()
    ray.train.report({"sum": hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum).item(), "of": hvd.__name__})

ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"], "RAY_TRAIN_V2_ENABLED": "0"}})
result = HorovodTrainer(train, scaling_config=ScalingConfig(num_workers=2),
                        run_config=RunConfig(storage_path="STORAGE")).fit()
print(result.metrics["sum"], result.metrics["of"])
""".replace("STORAGE", str(tmp_path))
    startup = str(ROOT / "bagua_hvd/runner/startup")
    output = run("-c", code, RAY_TRAIN_V2_ENABLED="0", PYTHONPATH=os.pathsep.join(
        filter(None, [startup, os.environ.get("PYTHONPATH")])))
    assert output.splitlines()[-1] == "3.0 bagua_hvd.torch"
