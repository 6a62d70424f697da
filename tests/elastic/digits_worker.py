"""Trains a small CNN on the digits in TEST_DIGITS (an archive of numpy arrays), and checks its sampler's indices.

Prints a line `event key=value ...` for each event. Trains further epochs until rank 0 finds the file TEST_STOP.
"""
import os
import sys

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bagua_hvd.torch as hvd

BATCH, LR = 32, 0.03


def say(event, **words):
    print(event, *(f"{key}={value}" for key, value in words.items()), flush=True)


def main(algorithm):
    torch.set_num_threads(1)
    with numpy.load(os.environ["TEST_DIGITS"]) as arrays:
        images, labels = torch.tensor(arrays["images"]), torch.tensor(arrays["labels"])
    train_set, test_set = TensorDataset(images[:1437], labels[:1437]), (images[1437:], labels[1437:])
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16, 32), nn.ReLU(),
        nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    hvd.init()
    say("up", rank=hvd.rank(), size=hvd.size(), pid=os.getpid())
    if algorithm == "bytegrad":
        algorithm = hvd.algorithms.ByteGrad(error_feedback=True)
    if algorithm == "auto":
        algorithm = hvd.algorithms.Auto(up_to="E2", window=3)
    if algorithm == "async":
        # A round is always in flight.
        algorithm = hvd.algorithms.get("async", sync_interval_ms=0)
    if algorithm == "diloco":
        # A fragment is always in flight.
        algorithm = hvd.algorithms.DiLoCo(4, fragments=2, overlap_steps=2, outer_lr=1, outer_momentum=0,
                                          error_feedback=True)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm=algorithm)
    sampler = hvd.elastic.ElasticSampler(train_set)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, steps=0, last=False)

    @hvd.elastic.run
    def train(state):
        # A second optimizer, created again after every reset: its buckets' names must differ from the other one's.
        extra = nn.Linear(3, 1)
        other = hvd.DistributedOptimizer(torch.optim.SGD(extra.parameters(), lr=0.1), extra.named_parameters())
        hvd.broadcast_parameters(extra.state_dict(), root_rank=0)
        say("enter", step=state.steps, epoch=state.epoch, done=sampler.processed_num, rank=hvd.rank(), size=hvd.size(),
            pid=os.getpid())
        while True:
            check_shares(sampler)
            for group in optimizer.param_groups:
                group["lr"] = LR * hvd.size()
            for batch_images, batch_labels in DataLoader(train_set, BATCH, sampler=sampler):
                optimizer.zero_grad()
                other.zero_grad()
                F.cross_entropy(model(batch_images), batch_labels).backward()
                extra(torch.ones(2, 3)).sum().backward()
                other.step()
                optimizer.step()
                state.batch += 1
                state.steps += 1
                sampler.record_batch(state.batch, BATCH)
                if state.batch % 3 == 0:
                    state.commit()
                    say("committed", step=state.steps)
            state.epoch += 1
            state.batch = 0
            sampler.set_epoch(state.epoch)
            state.last = hvd.broadcast_object(os.path.exists(os.environ["TEST_STOP"]), name="stop")
            state.commit()
            if state.last and state.epoch >= 12:
                return

    train(state)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    gathered = hvd.allgather(weights.view(1, -1))
    with torch.no_grad():
        right = (model(test_set[0]).argmax(1) == test_set[1]).float().mean().item()
    say("done", step=state.steps, rank=hvd.rank(), size=hvd.size(), accuracy=right,
        equal=bool((gathered == gathered[0]).all()))


def check_shares(sampler):
    """All ranks together have the rest of the epoch, in equal shares."""
    shares = hvd.allgather_object(list(sampler), name="shares")
    order = torch.randperm(1437, generator=torch.Generator().manual_seed(sampler.seed + sampler.epoch)).tolist()
    left = order[sampler.processed_num:]
    assert len({len(share) for share in shares}) == 1
    assert [index for row in zip(*shares, strict=True) for index in row][:len(left)] == left


main(sys.argv[1])
