"""Samples of unequal length: how long ranks wait for each other, with three ways of sharing them out.

    baguarun -np 2 python examples/torch_load_balancing.py --sampler bounded

Learns to predict the next character of Python's own help texts, paragraph by paragraph; these have from 3 to 6,005
characters, half of them fewer than 115. Paragraphs of a batch are padded to the longest.

    plain      torch's DistributedSampler: each rank takes its paragraphs regardless of length
    balanced   LoadBalancingDistributedSampler: the ranks' paragraphs in a step are about equally long
    bounded    LoadBalancingDistributedBatchSampler: so are those of a batch, and all batches are about equally large
"""
import argparse
import math
import pydoc_data.topics
import re
import sys
import time

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from torch_char_lm import LSTM, digest

import bagua_hvd.torch as hvd

PADDING = 0         # the number of no character


def paragraphs(longest):
    """The texts as numbers, cut to `longest` + 1 characters: nine of ten; every tenth, held out; vocabulary size."""
    texts = [text for topic in sorted(pydoc_data.topics.topics) for text in
             re.split(r"\n\s*\n", pydoc_data.topics.topics[topic]) if len(text) > 1]
    numbers = {character: number for number, character in enumerate(sorted(set("".join(texts))), PADDING + 1)}
    data = [torch.tensor([numbers[character] for character in text[:longest + 1]]) for text in texts]
    return [text for i, text in enumerate(data) if i % 10], data[::10], len(numbers) + 1


def pad(batch):
    return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=PADDING)


def loader(data, args):
    """Batches of this rank; and the object for set_epoch()."""
    if args.sampler == "plain":
        sampler = DistributedSampler(data, hvd.size(), hvd.rank(), seed=args.seed)
        return DataLoader(data, args.batch_size, sampler=sampler, collate_fn=pad), sampler
    sampler = hvd.LoadBalancingDistributedSampler(data, len, seed=args.seed, random_level=args.random_level)
    if args.sampler == "balanced":
        return DataLoader(data, args.batch_size, sampler=sampler, collate_fn=pad), sampler
    batches = hvd.LoadBalancingDistributedBatchSampler(
        sampler, max_cost=args.max_cost, cost=lambda lengths: len(lengths) * lengths[-1])
    return DataLoader(data, batch_sampler=batches, collate_fn=pad), batches


def loss_of(model, batch):
    """The sum of the loss over the characters of a padded batch, and their number."""
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PADDING,
                           reduction="sum")
    return loss, (batch[:, 1:] != PADDING).sum()


def train_epoch(model, optimizer, batches):
    """Returns the CPU seconds that this rank computed in each step, which other processes do not affect."""
    spent = []
    for batch in batches:
        started = time.thread_time()
        optimizer.zero_grad()
        loss, count = loss_of(model, batch)
        (loss / count).backward()
        spent.append(time.thread_time() - started)
        optimizer.step()        # waits for the others' gradients
    return torch.tensor(spent)


@torch.no_grad()
def bits_per_character(model, held_out):
    total = torch.zeros(2, dtype=torch.float64)
    for text in held_out[hvd.rank()::hvd.size()]:
        total += torch.tensor([value.item() for value in loss_of(model, text[None])], dtype=torch.float64)
    loss, count = hvd.allreduce(total, op=hvd.Sum, name="held_out").tolist()
    return loss / count / math.log(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sampler", choices=["plain", "balanced", "bounded"], default="bounded")
    parser.add_argument("--algorithm", help="default: BAGUA_ALGORITHM, else gradient_allreduce")
    parser.add_argument("--epochs", type=int, default=3, help="the first is not timed")
    parser.add_argument("--batch-size", type=int, default=8, help="paragraphs per rank and step: plain, balanced")
    parser.add_argument("--max-cost", type=int, default=1500, help="characters per rank and step, padding too: bounded")
    parser.add_argument("--random-level", type=float, default=0.0, help="noise in the order by length")
    parser.add_argument("--longest", type=int, default=1000, help="longer paragraphs are cut")
    parser.add_argument("--paragraphs", type=int, help="take so many only")
    parser.add_argument("--lr", type=float, default=4e-3, help="for one rank; multiplied by the root of their number")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    data, held_out, vocabulary = paragraphs(args.longest)
    data = data[:args.paragraphs]
    batches, epochs = loader(data, args)
    model = LSTM(vocabulary, args.longest)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr * math.sqrt(hvd.size()))
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), algorithm=args.algorithm,
                                         gradients_untouched=True)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    computed, seconds = [], []
    for epoch in range(args.epochs):
        epochs.set_epoch(epoch)
        hvd.barrier()
        started = time.perf_counter()
        spent = train_epoch(model, optimizer, batches)
        if epoch or args.epochs == 1:
            seconds.append(time.perf_counter() - started)
            computed.append(1000 * spent)
    computed = hvd.allgather(torch.cat(computed)[None], name="computed")       # shape (ranks, steps of all epochs)
    bits = bits_per_character(model, held_out)
    identical = len(set(hvd.allgather_object(digest(model)))) == 1
    if hvd.rank() == 0:
        slowest = computed.max(dim=0).values
        low, high = torch.quantile(slowest, torch.tensor([0.05, 0.95])).tolist()
        print(f"ranks: {hvd.size()}, sampler: {args.sampler}")
        print(f"epoch: {sum(seconds) / len(seconds):.2f} s, {len(batches)} steps")
        print(f"the slowest rank of a step computes {slowest.mean():.1f} ms, standard deviation "
              f"{slowest.std(correction=0):.1f}, 5th to 95th percentile {low:.1f} to {high:.1f}")
        print(f"of the ranks' time, {100 * (1 - computed.mean() / slowest.mean()):.1f} % is waiting for it")
        print(f"held out: {bits:.3f} bits per character")
        print(f"parameters identical on all ranks: {'yes' if identical else 'NO'}")
    hvd.shutdown()
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
