"""An algorithm that is not in the list, and how it is trained with: D2, gossip for ranks whose data differ.

    baguarun -np 4 python examples/own_algorithm.py --algorithm own

With step_i for the update that the user's optimizer subtracts, and h_i = x_i - step_i for the weights after it,

    x_i^(t+1) = sum_j W_ij (h_j^t + x_j^t - h_j^(t-1))          first step: sum_j W_ij h_j

which is 2 x^t - x^(t-1) - (step^t - step^(t-1)), mixed. Ranks that see different data (here: each its own digits) pull
their weights apart, step after step in the same direction; taking differences cancels that, plain gossip does not.
Source: Tang et al., arXiv:1803.07068. docs/own-algorithm.md explains it.
"""
import argparse
import sys

import torch
from torch.nn import functional as F
from torch_digits import Net, accuracy, digits

import bagua_hvd.torch as hvd
from bagua_hvd.algorithms import Algorithm, register
from bagua_hvd.primitives import d_fp_s


class D2(Algorithm):
    """Decentralized SGD on a ring, W_ij = 1/6 for both neighbours and 2/3 for oneself. For SGD without momentum."""

    uses_weights = ("after_step",)

    def communicates_gradients(self, model):
        return False

    def after_step(self, model):
        for bucket in model.weights:
            h = bucket.read()
            kept = bucket.state.keep("x - h", lambda h=h: 0 * h)
            corrected = h + kept
            neighbours = corrected.copy()
            d_fp_s(neighbours, model.group, topology="ring", name=bucket.name).wait()
            x = (corrected + neighbours) / 2
            kept[:] = x - h
            bucket.write(x)


register("own", D2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="own")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    train_set, test_set = digits()
    images, labels = train_set.tensors
    mine = labels % hvd.size() == hvd.rank()            # every rank has other digits
    images, labels = images[mine], labels[mine]

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), algorithm=args.algorithm
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(args.steps):
        batch = torch.randint(len(labels), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()

    alone = accuracy(model, test_set)
    hvd.consensus(model)
    if hvd.rank() == 0:
        print(f"ranks: {hvd.size()}, algorithm: {type(optimizer.algorithm).__name__}")
        print(f"test accuracy of rank 0: {100 * alone:.2f} %")
        print(f"test accuracy of the mean model: {100 * accuracy(model, test_set):.2f} %")
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
