"""A job of one rank that trains with DiLoCo and a quorum until it is killed; logs its pid, rounds and thetas.

    quorum_worker.py FILE       BAGUA_HVD_QUORUM_SERVER has the address of the other jobs' server
"""
import os
import sys
import time

import torch

import bagua_hvd.torch as hvd
from diloco import whole_diloco


def make(algorithm):
    """(model, optimizer)."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm=algorithm)


def step(model, optimizer, generator):
    """Makes one step, and returns its loss."""
    x = torch.randn(8, 6, generator=generator)
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True).tanh()).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def parts_of(optimizer):
    """The fragments, with this rank's state in their rounds."""
    return optimizer.reducer.model.scratch["rounds"]._parts


def main(file):
    hvd.init()
    model, optimizer = make(whole_diloco(4, quorum=0.5, grace_s=0.2))
    generator = torch.Generator().manual_seed(os.getpid())
    while True:
        step(model, optimizer, generator)
        part, = parts_of(optimizer)
        with open(file, "a") as log:
            log.write(f"{os.getpid()} {part.number} {part.outer()[0].tobytes().hex()}\n")
        time.sleep(0.005)


if __name__ == "__main__":
    main(sys.argv[1])
