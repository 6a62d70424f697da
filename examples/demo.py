"""The program of `make demo`: one network trained on two ranks over a slow network, with three algorithms.

    python examples/demo.py

The network is emulated: the ranks of this machine send over TCP, each at most MBITS Mbit/s (BAGUA_HVD_EMULATED_MBITS).
"""
import math
import os
import sys
import time
from pathlib import Path

ALGORITHMS = {"full gradients": "gradient_allreduce", "bytegrad": "bytegrad", "rotated": "rotated"}
MARKS = "*o+"
MBITS, RANKS, STEPS, BATCH = 100, 2, 120, 32
WIDTH, HEIGHT = 64, 12      # of the picture, in characters


def train(algorithm, steps):
    """Trains on one rank; returns the data of the table and the picture."""
    import torch
    from torch import nn
    from torch_digits import accuracy, digits

    import bagua_hvd.torch as hvd

    torch.set_num_threads(1)
    torch.manual_seed(1)
    train_set, test_set = digits()
    images, labels = (tensor[hvd.rank()::hvd.size()] for tensor in train_set.tensors)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
                          nn.Linear(512, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
                                         named_parameters=model.named_parameters(), algorithm=algorithm)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    losses, seconds = [], []
    hvd.statistics()            # reset: counts from here
    started = time.perf_counter()
    for step in range(steps):
        chosen = torch.randint(len(labels), (BATCH,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    return {"losses": losses, "seconds": seconds, "accuracy": accuracy(model, test_set),
            "bytes": hvd.statistics().recent.bytes_sent / steps}


def train_all(steps):
    """Runs on every rank: trains with each algorithm in turn, so that processes start only once."""
    import bagua_hvd.torch as hvd

    hvd.init()
    results = {}
    for name, algorithm in ALGORITHMS.items():
        results[name] = train(algorithm, steps)
        if hvd.rank() == 0:
            print(f"{name}: {steps} steps in {results[name]['seconds'][-1]:.1f} s", flush=True)
    return results


def table(results):
    exact = next(iter(results.values()))
    yield f"{'':16}{'seconds':>9}{'faster':>9}{'accuracy':>11}{'bytes per step':>17}"
    for name, r in results.items():
        yield (f"{name:16}{r['seconds'][-1]:>9.1f}{exact['seconds'][-1] / r['seconds'][-1]:>8.1f}x"
               f"{100 * r['accuracy']:>9.1f} %{r['bytes']:>17,.0f}")


def picture(results):
    """The smoothed loss over time, on a logarithmic axis; '#' where curves overlap."""
    longest = max(r["seconds"][-1] for r in results.values())

    def curve(r):
        """{column: log10 of the loss}"""
        cells = {}
        for second, loss in zip(r["seconds"], r["losses"], strict=True):
            cells.setdefault(min(WIDTH - 1, int(WIDTH * second / longest)), []).append(loss)
        return {x: math.log10(sum(cell) / len(cell) + 1e-6) for x, cell in cells.items()}

    curves = {name: curve(r) for name, r in results.items()}
    low, high = (extreme(extreme(curve.values()) for curve in curves.values()) for extreme in (min, max))
    rows = [[" "] * WIDTH for _ in range(HEIGHT)]
    for mark, values in zip(MARKS, curves.values(), strict=True):
        for x, value in values.items():
            y = round((high - value) / ((high - low) or 1) * (HEIGHT - 1))
            rows[y][x] = mark if rows[y][x] == " " else "#"
    for y, row in enumerate(rows):
        label = f"{10 ** (high - (high - low) * y / (HEIGHT - 1)):8.3f}" if y % 4 == 0 or y == HEIGHT - 1 else " " * 8
        yield f"{label} |{''.join(row)}".rstrip()
    yield " " * 9 + "+" + "-" * WIDTH
    yield f"{'':10}0{'seconds':^{WIDTH - 8}}{longest:5.1f}"
    legend = ", ".join(f"{mark} {name}" for mark, name in zip(MARKS, curves, strict=True))
    yield f"{'':10}loss: {legend}, # several"


def main(steps=STEPS, mbits=MBITS):
    os.environ |= {"OMP_NUM_THREADS": "1", "BAGUA_HVD_TRANSPORT": "tcp", "BAGUA_HVD_EMULATED_MBITS": str(mbits)}
    sys.path.insert(0, str(Path(__file__).parent))      # so that the ranks find torch_digits
    import bagua_hvd

    print(f"A small network learns to read digits on {RANKS} ranks, over an emulated network of {mbits} Mbit/s.\n",
          flush=True)
    results = bagua_hvd.run(train_all, (steps,), num_proc=RANKS)[0]
    print("", *table(results), "", *picture(results), sep="\n")
    print("""
Each algorithm makes the same steps. The fewer bytes it sends, the sooner it is done.

Try next:
    .venv/bin/baguarun -np 2 .venv/bin/python examples/torch_digits.py --algorithm bytegrad
    .venv/bin/baguarun -np 2 --as-horovod --algorithm bytegrad .venv/bin/python YOUR_HOROVOD_SCRIPT.py
    docs/choose.md: which algorithm for which network""")


if __name__ == "__main__":
    main()
