"""Samples that are slow to load, loaded once: the seconds of each epoch with and without a cache.

    baguarun -np 2 python examples/torch_cached_dataset.py --cache /dev/shm/spectra

The samples are compressed text files, made when the example starts. Ranks of a host share the cache: samples that one
rank has loaded are there for the others in the next epoch.
"""
import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler

import bagua_hvd.torch as hvd
from bagua_hvd.data import CachedDataset


class Spectra:
    """Files of 64 x 64 numbers; the label says which half has the larger sum."""

    def __init__(self, folder, count):
        self.paths = [Path(folder, f"{i}.txt.gz") for i in range(count)]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        values = np.loadtxt(self.paths[i], dtype=np.float32)
        return values, int(values[:32].sum() > values[32:].sum())


def make(paths):
    for i, path in enumerate(paths):
        generator = np.random.default_rng(i)
        scale = 1 + 0.5 * np.repeat([i % 2, 1 - i % 2], 32)[:, None]
        np.savetxt(path, scale * generator.random((64, 64)), fmt="%.4f")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", help="folder of the cache; without it samples are loaded each time")
    parser.add_argument("--size-limit", type=int, default=1 << 30, help="bytes")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as own:
        folder = hvd.broadcast_object(own, root_rank=0)
        dataset = Spectra(folder, args.samples)
        make(dataset.paths[hvd.rank()::hvd.size()])
        if args.cache:
            dataset = CachedDataset(dataset, args.cache, size_limit=args.size_limit)
        sampler = DistributedSampler(dataset, hvd.size(), hvd.rank())
        loader = DataLoader(dataset, batch_size=16, sampler=sampler)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64 * 64, 2))
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 1e-3), model.named_parameters())
        hvd.barrier()
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            started, right = time.perf_counter(), 0
            for inputs, labels in loader:
                optimizer.zero_grad()
                outputs = model(inputs)
                torch.nn.functional.cross_entropy(outputs, labels).backward()
                optimizer.step()
                right += (outputs.argmax(1) == labels).sum().item()
            right = hvd.allreduce(torch.tensor(right), op=hvd.Sum, name="right").item()
            if hvd.rank() == 0:
                seconds = time.perf_counter() - started
                print(f"epoch {epoch + 1}: {seconds:.2f} s, {100 * right / args.samples:.0f} % right", flush=True)
        hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
