"""What `make demo` shows: one network trained on two ranks, exactly and with 8-bit codes, side by side.

    python examples/demo.py
"""
import math
import os
import sys
import time
from pathlib import Path

ALGORITHMS = {"exact": "gradient_allreduce", "bytegrad": "bytegrad"}
EPOCHS, BATCH, RANKS = 12, 32, 2
WIDTH, HEIGHT = 64, 12      # of the picture, in characters


def train(algorithm, epochs):
    """One rank's whole training; returns what the table and the picture show."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler
    from torch_digits import Net, accuracy, digits

    import bagua_hvd.torch as hvd

    torch.set_num_threads(1)
    torch.manual_seed(1)
    train_set, test_set = digits()
    sampler = DistributedSampler(train_set, hvd.size(), hvd.rank())
    loader = DataLoader(train_set, BATCH, sampler=sampler)
    model = Net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.03 * hvd.size(), momentum=0.9),
                                         named_parameters=model.named_parameters(), algorithm=algorithm)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    losses, started = [], time.perf_counter()
    hvd.statistics()            # what follows is counted from here
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    seconds, steps, spent = time.perf_counter() - started, len(losses), hvd.statistics().recent
    return {"losses": losses, "accuracy": accuracy(model, test_set), "steps/s": steps / seconds,
            "bytes": spent.bytes_sent / steps, "exposed": spent.exposed_ms / steps}


def train_all(epochs):
    """On every rank: each algorithm after the other, so that processes start once."""
    import bagua_hvd.torch as hvd

    hvd.init()
    return {name: train(algorithm, epochs) for name, algorithm in ALGORITHMS.items()}


def table(results):
    yield f"{'':10}{'accuracy':>10}{'steps/s':>10}{'bytes sent':>12}{'exposed communication':>24}"
    for name, r in results.items():
        yield (f"{name:10}{100 * r['accuracy']:>8.1f} %{r['steps/s']:>10.0f}{r['bytes']:>12,.0f}"
               f"{r['exposed']:>21.2f} ms")


def picture(results):
    """Both curves of the loss, smoothed, its axis logarithmic; '#' where they lie on each other."""
    def curve(losses):
        cells = [losses[len(losses) * x // WIDTH:len(losses) * (x + 1) // WIDTH] for x in range(WIDTH)]
        return [math.log10(sum(cell) / len(cell) + 1e-6) for cell in cells]

    curves = {name: curve(r["losses"]) for name, r in results.items()}
    low, high = (extreme(map(extreme, curves.values())) for extreme in (min, max))
    rows = [[" "] * WIDTH for _ in range(HEIGHT)]
    for mark, values in zip("*o", curves.values(), strict=True):
        for x, value in enumerate(values):
            y = round((high - value) / (high - low) * (HEIGHT - 1))
            rows[y][x] = mark if rows[y][x] == " " else "#"
    for y, row in enumerate(rows):
        label = f"{10 ** (high - (high - low) * y / (HEIGHT - 1)):8.3f}" if y % 4 == 0 or y == HEIGHT - 1 else " " * 8
        yield f"{label} |{''.join(row)}".rstrip()
    yield " " * 9 + "+" + "-" * WIDTH
    legend = ", ".join(f"{mark} {name}" for mark, name in zip("*o", curves, strict=True))
    yield f"{'':10}loss over {len(next(iter(results.values()))['losses'])} steps: {legend}, # both"


def main(epochs=EPOCHS):
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(Path(__file__).parent))      # the ranks find torch_digits where this process does
    import bagua_hvd

    print(f"A small network learns to read digits, on {RANKS} ranks of this machine, once for each algorithm ...\n")
    results = bagua_hvd.run(train_all, (epochs,), num_proc=RANKS)[0]
    print("\n".join(table(results)), end="\n\n")
    print("\n".join(picture(results)), end="\n\n")
    exact, coded = results.values()
    ratio, points = exact["bytes"] / coded["bytes"], 100 * abs(exact["accuracy"] - coded["accuracy"])
    print(f"""\
{ratio:.1f} times fewer bytes per step and rank; the accuracies are {points:.1f} points apart. Inside one machine bytes
cost little, and encoding them takes time; between machines they are what one waits for.

What to try next:
    .venv/bin/baguarun -np 2 .venv/bin/python examples/torch_digits.py --algorithm decentralized
    .venv/bin/baguarun -np 2 .venv/bin/python examples/torch_char_lm.py     # a small transformer
    BAGUA_ALGORITHM=bytegrad .venv/bin/baguarun -np 2 .venv/bin/python YOUR_HOROVOD_SCRIPT.py
    docs/algorithms.md: which algorithm for which network""")


if __name__ == "__main__":
    main()
