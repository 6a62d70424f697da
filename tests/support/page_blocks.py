"""The code blocks of the documentation's pages, and one rank of a job that runs a page's Python blocks in order.

A comment `<!-- not run: REASON -->` before a block says why it is not run. A `console` block has commands after `$ `.
Run as `python page_blocks.py PAGE`, this file is a rank: it runs the page's train.py (a block with that title), then
the other Python blocks, in one namespace that SETUPS[PAGE] initializes.
"""
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Languages of text, not code.
TEXTS = {"diff", "math", "text"}
_BLOCK = re.compile(r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n+)?"
                    r'(?P<fence>```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$)', re.M | re.S)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}\S[^\n]*\n)+")


class Block(NamedTuple):
    """line: of its first line of code, from 1. title: a file's name, or "". reason: why it is not run, or ""."""

    page: str
    line: int
    language: str
    title: str
    text: str
    reason: str

    def commands(self):
        return [line.removeprefix("$ ") for line in self.text.splitlines() if line.startswith("$ ")]


def pages():
    """README.md and all pages for users, without the generated reference, decisions and results."""
    return [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("tutorials/*.md"))]


def blocks(page):
    text, found = page.read_text(), []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        found.append(Block(page.name, line, match["language"], match["title"] or "", match["text"],
                           match["reason"] or ""))
    return found


def indented(page):
    """Blocks that are marked by indentation only."""
    return _INDENTED.findall(_BLOCK.sub("", page.read_text()))


TORCH = """
import os
import torch
import bagua_hvd.torch as hvd
hvd.init()
torch.manual_seed(0)
layers = [torch.nn.Embedding(8, 4), torch.nn.Flatten(), torch.nn.Linear(8, 1)]
model = torch.nn.Sequential(*layers)
plain = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randint(8, (16, 2)), torch.rand(16, 1)
batch_size, epochs = 4, 2
train_set = dataset = torch.utils.data.TensorDataset(inputs, targets)

def wrapped(**options):
    found = torch.optim.SGD(model.parameters(), lr=0.1)
    found = hvd.DistributedOptimizer(found, named_parameters=model.named_parameters(), **options)
    for _ in range(3):
        found.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        found.step()
    return found
"""
KERAS = """
import keras
import numpy as np
import bagua_hvd.keras as hvd
hvd.init()
images, labels = np.random.rand(64, 8).astype("float32"), np.random.randint(0, 4, 64)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, "softmax", dtype="float32")])
loss, test_part = "sparse_categorical_crossentropy", (images, labels)
"""
SETUPS = {
    "checkpoints.md": TORCH + """
folder = f"rank{hvd.rank()}"
os.makedirs(folder)
os.chdir(folder)
optimizer, epoch = wrapped(), 3
""",
    "choose.md": TORCH + "wrapped()\n",
    "debugging.md": TORCH + "wrapped()\n",
    "data.md": TORCH,
    "elastic.md": TORCH,
    "keras-several-hosts.md": KERAS,
    "own-algorithm.md": "",
    "README.md": TORCH,
    "running.md": TORCH + """
wrapped(algorithm="bytegrad")
step = 3
class writer:
    add_scalar = print
""",
    "torch-distributed.md": """
import torch
model = torch.nn.Linear(4, 2)
""",
}


def compiled(block):
    """The compiled block, with the page's line numbers."""
    return compile("\n" * (block.line - 1) + block.text, block.page, "exec")


def main(name):
    page = next(page for page in pages() if page.name == name)
    namespace = {"__name__": "__main__"}
    exec(compile(SETUPS.get(name, ""), f"setup of {name}", "exec"), namespace)
    found = [block for block in blocks(page) if block.language == "python" and not block.reason]
    plain = [block for block in found if not block.title]
    for block in [block for block in found if block.title == "train.py" and plain] + plain:
        if "hvd.init(" in block.text and "hvd" in namespace:
            namespace["hvd"].shutdown()
        exec(compiled(block), namespace)
    print(f"ran {len(plain)} blocks")


if __name__ == "__main__":
    main(sys.argv[1])
