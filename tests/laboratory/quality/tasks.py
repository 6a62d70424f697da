"""The trained tasks: a model, its data, and the distribution of its batches over the ranks.

The size of a batch does not depend on the number of ranks: each has its share. Examples are drawn from the same
distribution everywhere (iid) or, if they have labels, so that every rank has mostly some of them (skewed): half of its
share from two n-ths of the labels, in turn, the rest from all.
"""
import copy
import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

from tests.laboratory.quality import data

CONTEXT = 32
LENGTH = 96


class Causal(nn.Module):
    """Characters -> logits of the next one."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(x) + self.place, mask=self.mask, is_causal=True))


class Reader(nn.Module):
    """Characters -> logits of the whole text's label, from patterns of five, and again of five, at any position."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 24)
        self.first = nn.Conv1d(24, width, 5)
        self.second = nn.Conv1d(width, width, 5, stride=2)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first(self.embedding(x).transpose(1, 2)))
        return self.head(F.relu(self.second(F.max_pool1d(y, 2))).amax(2))


class Recurrent(nn.Module):
    """Tokens -> logits of the next one."""

    def __init__(self, vocabulary: int, width: int, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32)
        self.cells = kind(32, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(self.embedding(x))[0])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24 * 4, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn1d() -> nn.Module:
    """The convolutional network of arXiv:2011.14439."""
    return nn.Sequential(
        nn.Conv1d(1, 25, 5, 2, 1), nn.ReLU(), nn.Conv1d(25, 25, 3, 2, 1), nn.ReLU(), nn.Conv1d(25, 25, 3, 2, 1),
        nn.ReLU(), nn.Flatten(), nn.Linear(125, 10))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(22, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 5))


@functools.cache
def _random_features() -> nn.Module:
    """A Reader that has learned a random network's labels of a text. Equal on all ranks, for any seed."""
    parts, vocabulary = data.sources(LENGTH)
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        model, teacher = Reader(vocabulary, 48, 32), Reader(vocabulary, 48, 32)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(200):
            x = parts["train"][0][torch.randint(len(parts["train"][0]), (32,))]
            optimizer.zero_grad()
            F.mse_loss(model(x), teacher(x).detach()).backward()
            optimizer.step()
        model.head = nn.Linear(48, data.CLASSES)
    return model


def random_features() -> nn.Module:
    """Another one like it."""
    return copy.deepcopy(_random_features())


class Task:
    """One of the tasks.

    Args:
        optimizers: name -> candidate learning rates, for the whole batch.
        batch: examples of all ranks in a step. make: returns a model with its first weights.
        load: returns its Parts. classes: number of labels; 0: windows of a text, each predicting the next token.
        decays: whether the learning rate warms up and then decays; False: constant, as in a loop without a schedule.
        then: the task for which the model is fine-tuned afterwards, with full gradients. Its loss there counts.
    """

    def __init__(self, name: str, optimizers: dict[str, tuple[float, ...]], steps: int, batch: int,
                 make: Callable[[], nn.Module], load: Callable[[], data.Parts], classes: int = 0,
                 decays: bool = True, then: "Task | None" = None) -> None:
        self.name = name
        self.optimizers = optimizers
        self.steps = steps
        self.batch = batch
        self.make = make
        self.load = load
        self.classes = classes
        self.decays = decays
        self.then = then

    @functools.cached_property
    def parts(self) -> data.Parts:
        return self.load()

    def batches(self, rank: int, ranks: int, seed: int, skewed: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(inputs, labels) of this rank, for all steps."""
        choice = torch.Generator().manual_seed(10_000 * seed + rank)
        share = self.batch // ranks
        everything = torch.arange(len(self.parts["train"][0]))
        mine = everything
        if skewed:
            labels, classes = self.parts["train"][1], self.classes
            favoured = {(rank * classes // ranks + place) % classes for place in range(max(1, 2 * classes // ranks))}
            mine = everything[torch.isin(labels, torch.tensor(sorted(favoured)))]
        for _ in range(self.steps):
            half = share // 2
            chosen = torch.cat([mine[torch.randint(len(mine), (share - half,), generator=choice)],
                                everything[torch.randint(len(everything), (half,), generator=choice)]])
            yield self.pairs("train", chosen)

    def pairs(self, part: str, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = self.parts[part]
        if self.classes:
            return tensors[0][rows], tensors[1][rows]
        return tensors[0][rows][:, :-1], tensors[0][rows][:, 1:]

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Cross entropy in nats."""
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction=reduction)

    @torch.no_grad()
    def sums(self, model: nn.Module, part: str, rows: torch.Tensor) -> torch.Tensor:
        """(sum of losses, number of correct answers, number of answers) over some rows of a part."""
        total = torch.zeros(3, dtype=torch.float64)
        for some in rows.split(256):
            x, y = self.pairs(part, some)
            logits = model(x).flatten(0, -2)
            total += torch.tensor([float(F.cross_entropy(logits, y.flatten(), reduction="sum")),
                                   float((logits.argmax(1) == y.flatten()).sum()), y.numel()])
        return total


def _characters(name: str = "characters", rates: tuple[float, ...] = (0.008, 0.016, 0.032, 0.064),
                steps: int = 240) -> Task:
    return Task(name, {"adam": rates}, steps, 32,
                lambda: Causal(data.characters(CONTEXT)[1], CONTEXT, 40, 2), lambda: data.characters(CONTEXT)[0])


def _tokens() -> Task:
    return Task("tokens", {"adam": (0.016, 0.032, 0.064, 0.128)}, 240, 32,
                lambda: Recurrent(data.tokens(20)[1], 64), lambda: data.tokens(20)[0])


def _aside(name: str = "aside", rates: tuple[float, ...] = (0.004, 0.008, 0.016, 0.032),
           then: Task | None = None) -> Task:
    """Three epochs of windows of 32."""
    text = data.docstrings(CONTEXT)
    steps = 3 * len(text[0]["train"][0]) // (CONTEXT * 32)
    return Task(name, {"adam": rates}, steps, 32, lambda: Recurrent(text[1], 64, nn.GRU), lambda: text[0], then=then)


def _code(epochs: float = 3) -> Task:
    """Like aside, nearly three times as long, on another text, and with a constant learning rate that was not tuned."""
    text = data.code(CONTEXT // 2)
    steps = int(epochs * len(text[0]["train"][0])) // (CONTEXT // 2 * 32)
    return Task("code", {"adam": (0.004,)}, steps, 32,
                lambda: Recurrent(text[1], 64, nn.GRU), lambda: text[0], decays=False)


def _book() -> Task:
    """A transformer of a million parameters."""
    context = 64
    return Task("book", {"adam": (0.002,)}, 3000, 8,
                lambda: Causal(data.book(context)[1], context, 176, 4), lambda: data.book(context)[0])


# Held out: no default was chosen with these tasks; they were evaluated after all had been.
ASIDE = ("aside", "code", "long", "mnist1d", "book", "fine-tuned")
TASKS: dict[str, Callable[[], Task]] = {
    "images": lambda: Task("images", {"sgd": (0.06, 0.12, 0.24, 0.48), "adam": (0.004, 0.008, 0.016, 0.032)}, 300, 64,
                           cnn, data.images, 10),
    "characters": _characters,
    "tokens": _tokens,
    "tabular": lambda: Task("tabular", {"sgd": (0.05, 0.1, 0.2, 0.4), "adam": (0.004, 0.008, 0.016, 0.032)}, 300, 128,
                            perceptron, data.diamonds, 5),
    "fine-tuning": lambda: Task("fine-tuning", {"adamw": (0.001, 0.002, 0.004, 0.008)}, 240, 32,
                                random_features, lambda: data.sources(LENGTH)[0], data.CLASSES),
    "aside": _aside,
    "code": _code,
    # Long enough for sparse communication. Of 0.008, 0.016 and 0.032, this had the lowest validation loss (seed 1000).
    "long": lambda: _characters("long", (0.016,), 2000),
    # Model and learning rate as published.
    "mnist1d": lambda: Task("mnist1d", {"adam": (0.01,)}, 2000, 96, cnn1d, data.series, 10),
    "book": _book,
    # aside with its chosen rate, then half an epoch of code: fixed before any training.
    "fine-tuned": lambda: _aside("fine-tuned", (0.032,), _code(0.5)),
}
