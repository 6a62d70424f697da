"""Runs Lightning's own tests that start two processes, with BaguaStrategy wherever they name ddp.

    python tests/lightning/lightning_tests.py CHECKOUT [--strategy ddp] [--algorithm bytegrad] [--spawn] [-k pruning]

CHECKOUT: Lightning's repository at the installed version, because the packages contain no tests. Other arguments go to
pytest. --strategy ddp: the same on Lightning's own strategy, as a control. Tests that want two GPUs run on the CPU.
Processes are forked, which saves importing torch in each, unless --spawn is given, as in most of the tests.
"""
import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import pytest

# The tests of each file that start processes and can run on the CPU.
TESTS = {
    "callbacks/test_pruning.py": ["pruning_callback_ddp_spawn", "pruning_callback_ddp_cpu"],
    "callbacks/test_stochastic_weight_avg.py": [
        "swa_callback_ddp_spawn", "swa_callback_ddp_cpu", "swa_resume_training_from_checkpoint_ddp"],
    "callbacks/test_weight_averaging.py": ["ema_ddp_spawn", "ema_resume_ddp"],
    "checkpointing/test_torch_saving.py": ["model_torch_save_ddp_cpu"],
    "core/test_metric_result_integration.py": ["result_reduce_ddp"],
    "models/test_cpu.py": ["multi_cpu_model_ddp"],
    "strategies/test_ddp_integration.py": ["test_ddp_cpu"],
    "trainer/logging_/test_distributed_logging.py": ["all_rank_logging_ddp_cpu", "all_rank_logging_ddp_spawn"],
    "trainer/optimization/test_manual_optimization.py": ["with_different_frequencies_ddp"],
    "trainer/test_trainer.py": [
        "trainer_predict_ddp_spawn", "spawn_predict_return_predictions", "(correct_mode_during_stages and ddp_spawn)",
        "fit_test_synchronization"],
    "utilities/test_all_gather_grad.py": ["all_gather_ddp_spawn"],
}
ON_CPU = {"min_cuda_gpus=2, standalone=True": "min_cuda_gpus=0", "min_cuda_gpus=2": "min_cuda_gpus=0",
          'accelerator="gpu"': 'accelerator="cpu"'}


def register(strategy, algorithm, spawn):
    """Registers this strategy, and its class, under the names of ddp."""
    cls, options = pl.strategies.DDPStrategy, {}
    if strategy == "bagua":
        from bagua_hvd.lightning import BaguaStrategy as cls

        options = {"algorithm": algorithm}
    for name in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook"):
        method = "spawn" if spawn and name == "ddp_spawn" else "fork"
        pl.strategies.StrategyRegistry.register(name, cls, override=True, start_method=method, **options)
    pl.strategies.DDPStrategy = cls


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--strategy", choices=["bagua", "ddp"], default="bagua")
    parser.add_argument("--algorithm", help="of BaguaStrategy")
    parser.add_argument("--spawn", action="store_true")
    parser.add_argument("-k", dest="pattern", default="", help="which of these tests, as pytest's -k")
    arguments, rest = parser.parse_known_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"         # rank 0's sockets
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    register(arguments.strategy, arguments.algorithm, arguments.spawn)
    with tempfile.TemporaryDirectory(prefix="lightning_tests.") as work:
        shutil.copytree(arguments.checkout / "tests/tests_pytorch", Path(work) / "tests_pytorch")
        files = [Path(work) / "tests_pytorch" / name for name in TESTS]
        for file in files:
            text = file.read_text()
            for there, here in ON_CPU.items():
                text = text.replace(there, here)
            file.write_text(text)
        os.chdir(work)
        sys.path.insert(0, work)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [work, os.environ.get("PYTHONPATH")]))
        pattern = " or ".join(name for names in TESTS.values() for name in names)
        pattern = f"({pattern}) and not gpu" + (f" and ({arguments.pattern})" if arguments.pattern else "")
        return pytest.main(["-p", "no:cacheprovider", "--rootdir", work, "--timeout=300", "-rfEs", "-k", pattern, *rest,
                            *map(str, files)])


if __name__ == "__main__":
    sys.exit(main())
