"""Learns to predict the next character of Python's own help texts, with an LSTM or a small transformer.

    baguarun -np 2 python examples/torch_char_lm.py --model transformer --algorithm bytegrad

Shows clipping of reduced gradients, a learning-rate schedule, and an evaluation shared among the ranks.
"""
import argparse
import hashlib
import math
import pydoc_data.topics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

import bagua_hvd.torch as hvd


class LSTM(nn.Module):
    """Characters -> logits of the next one."""

    def __init__(self, vocabulary, context, width=160):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32)
        self.lstm = nn.LSTM(32, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, characters):
        return self.head(self.lstm(self.embedding(characters))[0])


class Transformer(nn.Module):
    """Characters -> logits of the next one; each position sees itself and those before."""

    def __init__(self, vocabulary, context, width=96, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, activation="gelu",
                                           batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, characters):
        return self.head(self.layers(self.embedding(characters) + self.place, mask=self.mask, is_causal=True))


MODELS = {"lstm": LSTM, "transformer": Transformer}
# About a minute on two cores.
STEPS = {"lstm": 1500, "transformer": 900}
# For one rank. Adam normalizes its steps, so for n ranks the square root of n is the usual factor.
RATES = {"lstm": 6e-3, "transformer": 2e-3}


def characters():
    """The text as numbers: nine tenths for training, the rest held out; and the size of the vocabulary."""
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    vocabulary = {character: number for number, character in enumerate(sorted(set(text)))}
    data = torch.tensor([vocabulary[character] for character in text])
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:], len(vocabulary)


def unigram_bits(train_data, held_out, vocabulary):
    """Bits per character of the held-out part for a model that knows only the character frequencies in training."""
    counts = torch.bincount(train_data, minlength=vocabulary).double() + 1
    return F.cross_entropy((counts / counts.sum()).log().expand(len(held_out), -1), held_out).item() / math.log(2)


def train(model, optimizer, data, args):
    """Trains; each rank draws its own windows."""
    choice = torch.Generator().manual_seed(args.seed + hvd.rank())
    warmup = max(1, args.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / args.steps))
    )
    window = torch.arange(args.context + 1)
    started = time.perf_counter()
    for step in range(args.steps):
        starts = torch.randint(len(data) - args.context, (args.batch_size, 1), generator=choice)
        windows = data[starts + window]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
        if hvd.rank() == 0 and (step + 1) % max(1, args.steps // 10) == 0:
            print(f"step {step + 1}: {loss.item() / math.log(2):.3f} bits per character, "
                  f"{(step + 1) / (time.perf_counter() - started):.1f} steps/s", flush=True)


@torch.no_grad()
def bits_per_character(model, data, context):
    """The mean over all windows of the held-out part; each rank evaluates every n-th window."""
    model.eval()
    windows = data[:(len(data) - 1) // context * context + 1].unfold(0, context + 1, context)
    total = torch.zeros(2, dtype=torch.float64)
    for mine in windows[hvd.rank()::hvd.size()].split(64):
        loss = F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten(), reduction="sum")
        total += torch.tensor([loss.item(), mine[:, 1:].numel()], dtype=torch.float64)
    loss, count = hvd.allreduce(total, op=hvd.Sum, name="held_out").tolist()
    return loss / count / math.log(2)


def digest(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="lstm")
    parser.add_argument("--algorithm", help="default: BAGUA_ALGORITHM, else gradient_allreduce")
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--batch-size", type=int, default=32, help="windows per rank and step")
    parser.add_argument("--context", type=int, default=64, help="characters in a window")
    parser.add_argument("--lr", type=float,
                        help=f"for one rank; multiplied by the square root of their number; default: {RATES}")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    args.steps = args.steps or STEPS[args.model]
    args.lr = args.lr or RATES[args.model]

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + hvd.rank())       # different weights on each rank, until rank 0's are broadcast
    train_data, held_out, vocabulary = characters()

    model = MODELS[args.model](vocabulary, args.context)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr * math.sqrt(hvd.size()))
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), algorithm=args.algorithm
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    train(model, optimizer, train_data, args)
    bits = bits_per_character(model, held_out, args.context)
    digests = hvd.allgather_object(digest(model))
    identical = len(set(digests)) == 1
    if hvd.rank() == 0:
        print(f"ranks: {hvd.size()}, model: {args.model}, algorithm: {type(optimizer.algorithm).__name__}")
        print(f"held out: {bits:.3f} bits per character")
        print(f"unigram entropy, held out: {unigram_bits(train_data, held_out, vocabulary):.3f} bits per character")
        print(f"parameters identical on all ranks: {'yes' if identical else 'NO'}")
    hvd.shutdown()
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
