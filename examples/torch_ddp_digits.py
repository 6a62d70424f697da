"""Trains on scikit-learn's handwritten digits with torch's DistributedDataParallel, over bagua_hvd.

    torchrun --nproc-per-node 2 examples/torch_ddp_digits.py                                    the backend
    torchrun --nproc-per-node 2 examples/torch_ddp_digits.py --hook bytegrad --backend gloo     a hook, over gloo
    baguarun -np 2 python examples/torch_ddp_digits.py --wrap decentralized                     weights instead

Compared with a script for torch.distributed, it has one more import and one more line.
"""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import bagua_hvd.torch.distributed  # noqa: F401  (registers the backend with a torch before 2.5)
from bagua_hvd.torch import ddp


def digits():
    """1437 images for training, 360 for testing."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return TensorDataset(images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def start(backend):
    """torchrun sets torch's variables; baguarun sets bagua_hvd's, from which torch then gets rank and size."""
    if "RANK" in os.environ:
        dist.init_process_group(backend)
        return
    import bagua_hvd.torch as hvd

    hvd.init()
    file = hvd.broadcast_object(f"{tempfile.gettempdir()}/torch_ddp_digits.{os.getpid()}")
    dist.init_process_group(backend, init_method=f"file://{file}", rank=hvd.rank(), world_size=hvd.size())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="bagua")
    parser.add_argument("--hook", help="an algorithm of gradients, as a communication hook")
    parser.add_argument("--wrap", help="any algorithm, as a wrapped optimizer")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    start(arguments.backend)
    train_set, (test_images, test_labels) = digits()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 32, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    if arguments.hook:
        model.register_comm_hook(None, ddp.hook(arguments.hook))
    if arguments.wrap:
        optimizer = ddp.wrap_optimizer(optimizer, model, arguments.wrap)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    with torch.no_grad():
        correct = (model.module(test_images).argmax(1) == test_labels).float().mean()
    dist.all_reduce(correct)
    if dist.get_rank() == 0:
        print(f"backend {dist.get_backend()}, test accuracy: {100 * correct / dist.get_world_size():.1f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
