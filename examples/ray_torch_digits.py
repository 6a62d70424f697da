"""Trains a small network on scikit-learn's handwritten digits on a Ray cluster, by Ray's TorchTrainer.

    python examples/ray_torch_digits.py --num-workers 2 --algorithm bytegrad

The trainer starts the ranks and creates their torch.distributed group; hvd.init() uses its ranks.
"""
import argparse
import tempfile

import ray
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config):
    """The training loop of a rank."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    import bagua_hvd.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm=config["algorithm"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(config["epochs"]):
        order = torch.arange(hvd.rank(), 1437, hvd.size())
        order = order[torch.randperm(len(order))][:1437 // hvd.size()]
        for batch in order.split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    if optimizer.algorithm.models_differ:
        hvd.consensus(model)
    with torch.no_grad():
        accuracy = (model(images[1437:]).argmax(1) == labels[1437:]).float().mean().item()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), f"{folder}/model.pt")
        checkpoint = Checkpoint.from_directory(folder) if hvd.rank() == 0 else None
        ray.train.report({"ranks": hvd.size(), "accuracy": accuracy}, checkpoint=checkpoint)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--algorithm", default=None, help="default: BAGUA_ALGORITHM, else gradient_allreduce")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--storage", default=None, help="a folder that all nodes share; default: Ray's")
    args = parser.parse_args()

    result = TorchTrainer(
        train, train_loop_config={"algorithm": args.algorithm, "epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=args.num_workers),
        run_config=RunConfig(storage_path=args.storage)).fit()
    print(f"{result.metrics['ranks']} ranks, test accuracy: {100 * result.metrics['accuracy']:.2f} %")


if __name__ == "__main__":
    main()
