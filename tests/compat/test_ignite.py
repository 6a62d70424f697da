"""pytorch-ignite's backend "horovod", with an unmodified Ignite."""
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("ignite", reason="not installed: pip install pytorch-ignite")

# Every rank has its own samples; the trained weights must be equal.
SCRIPT = """
import torch
from torch.utils.data import TensorDataset
import ignite.distributed as idist
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, RunningAverage

def training(local_rank, config):
    assert (idist.backend(), idist.get_world_size(), idist.get_local_rank()) == ("horovod", 2, local_rank)
    rank = idist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(512, 4)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader = idist.auto_dataloader(data, batch_size=64, shuffle=True)
    assert loader.batch_size == 32 and len(loader) == 8
    torch.manual_seed(rank)
    model = idist.auto_model(torch.nn.Linear(4, 2))                     # broadcast from rank 0
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5))
    assert hasattr(optimizer, "_allreduce_grad_async")
    trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.cross_entropy)
    accuracy = {"accuracy": Accuracy()}
    evaluator = create_supervised_evaluator(model, accuracy)
    trainer.run(loader, max_epochs=3)
    found = evaluator.run(loader).metrics["accuracy"]                   # of all ranks
    weights = idist.all_gather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
    assert weights.shape == (2, 10) and torch.equal(weights[0], weights[1])
    assert found > 0.95, found

    assert idist.all_reduce(rank + 1) == 3 and idist.all_reduce(float(rank), op="MAX") == 1
    assert idist.all_reduce(torch.tensor([rank + 1.0]), op="MIN").item() == 1
    assert idist.all_gather("ab"[rank]) == ["a", "b"] and idist.all_gather(rank) == [0, 1]
    assert idist.broadcast(torch.full((3,), float(rank)), src=1).tolist() == [1, 1, 1]
    assert idist.broadcast("from one" if rank else None, src=1, safe_mode=True) == "from one"
    idist.barrier()
    group = idist.new_group([1])
    assert idist.all_gather(torch.tensor([7 + rank]), group=group).tolist() == [7 + rank]
    idist.barrier()             # who leaves ends what others still ask for, in sets without him, too
    assert idist.model_name() == "horovod-dist"
    print("trained", rank, flush=True)

with idist.Parallel(backend="horovod") as parallel:
    parallel.run(training, {})
"""


def test_parallel(launcher):
    script = launcher.folder / "train.py"
    script.write_text(SCRIPT)
    done = launcher.run("--as-horovod", "-np", 2, sys.executable, script, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line.split()[-1] for line in done.stdout.splitlines() if "trained" in line) == ["0", "1"]
