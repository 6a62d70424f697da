"""Trains a small CNN on scikit-learn's handwritten digits, as a Horovod user writes it.

    baguarun -np 2 python examples/torch_digits.py --algorithm bytegrad

Change the import to `import horovod.torch as hvd`, and drop `algorithm=` and the report, and it is a Horovod script.
"""
import argparse
import hashlib
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import bagua_hvd.torch as hvd


class Net(nn.Module):
    """Two convolutions and two linear layers over 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def digits():
    """The data, shuffled alike on all ranks: 1437 images for training, 360 for testing."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def train(model, optimizer, loader, sampler, epochs):
    """Returns the number of steps and the seconds they took."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    steps, started = 0, time.perf_counter()
    for epoch in tqdm(range(epochs), desc="epochs", disable=hvd.rank() != 0):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            steps += 1
        scheduler.step()
    return steps, time.perf_counter() - started


@torch.no_grad()
def accuracy(model, dataset):
    images, labels = dataset.tensors
    return (model(images).argmax(1) == labels).float().mean().item()


def digest(model):
    """SHA-256 of all parameters, as a tensor of 32 bytes."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    return torch.tensor(list(sha.digest()), dtype=torch.uint8)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default=None, help="default: BAGUA_ALGORITHM, else gradient_allreduce")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.03, help="for one rank; multiplied by their number")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + hvd.rank())       # different weights on each rank, until rank 0's are broadcast
    train_set, test_set = digits()
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), algorithm=args.algorithm
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    hvd.statistics()        # reset: counts from here
    steps, seconds = train(model, optimizer, loader, sampler, args.epochs)
    spent = hvd.statistics().recent

    if optimizer.algorithm.asynchronous:
        optimizer.algorithm.abort()
    if optimizer.algorithm.models_differ:
        hvd.consensus(model)
    digests = hvd.allgather(digest(model).view(1, -1))
    identical = bool((digests == digests[0]).all())
    if hvd.rank() == 0:
        print(f"ranks: {hvd.size()}, algorithm: {type(optimizer.algorithm).__name__}")
        print(f"test accuracy: {100 * accuracy(model, test_set):.2f} %")
        print(f"steps/s: {steps / seconds:.1f}")
        print(f"bytes sent per step and rank: {spent.bytes_sent / steps:.0f}")
        print(f"exposed communication per step: {spent.exposed_ms / steps:.3f} ms")
        print(f"parameters identical on all ranks: {'yes' if identical else 'NO'}")
    hvd.shutdown()
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
