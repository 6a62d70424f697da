"""Trains a small CNN on scikit-learn's handwritten digits while hosts come and go, as a Horovod user writes it.

    baguarun --host-discovery-script ./discover.sh --min-np 1 --max-np 4 python examples/torch_elastic_digits.py

Change the import to `import horovod.torch as hvd`, and drop `algorithm=`, and it is a Horovod script.
"""
import argparse
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bagua_hvd.torch as hvd


def make_model():
    """Two convolutions and two linear layers over 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )


def digits():
    """The data, shuffled alike on all ranks: 1437 images for training, 360 for testing."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


@torch.no_grad()
def accuracy(model, dataset):
    images, labels = dataset.tensors
    return (model(images).argmax(1) == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default=None, help="default: BAGUA_ALGORITHM, else gradient_allreduce")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.03, help="for one rank; multiplied by their number")
    args = parser.parse_args()

    # Do slow preparations before init(): the other ranks continue training until this process is ready.
    torch.set_num_threads(1)
    torch.manual_seed(42)
    train_set, test_set = digits()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    hvd.init()
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), algorithm=args.algorithm
    )
    sampler = hvd.elastic.ElasticSampler(train_set)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

    def scale_learning_rate():
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    state.register_reset_callbacks([scale_learning_rate])

    @hvd.elastic.run
    def train(state):
        # Also for ranks that joined later, whose optimizer has just been synchronized.
        scale_learning_rate()
        while state.epoch < args.epochs:
            for images, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
                state.batch += 1
                state.sampler.record_batch(state.batch, args.batch_size)
                if state.batch % 5 == 0:
                    state.commit()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch + 1} of {args.epochs}, {hvd.size()} ranks: "
                      f"test accuracy {100 * accuracy(model, test_set):.2f} %", flush=True)
            state.epoch += 1
            state.batch = 0
            state.sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
