"""The files that a gradient passes on its way to the core: those of the decision's page, ten and fourteen at most."""
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "decisions" / "0039-floors-of-python.md"
STEPS = 4


def of_page():
    """The two tables' columns of files, as they are now."""
    section = PAGE.read_text().partition("## A gradient's way")[2].partition("\n## ")[0]
    tables = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)]
    return [{row.split("|")[3].strip() for row in rows[2:]} for rows in tables]


def walk_torch(expected):
    import torch

    import bagua_hvd.torch as hvd
    from walk import walked

    hvd.init()
    model, found = torch.nn.Linear(8, 8), {}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(),
                                         algorithm="bytegrad")
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).sum()
        with walked(found if step == STEPS - 1 else {}):        # the first one is the ranks' agreement
            loss.backward()
        optimizer.step()
    assert sorted(found) == expected


def walk_fit(expected):
    import keras
    import numpy as np

    import bagua_hvd.tensorflow.keras as hvd
    from bagua_hvd.tensorflow.bridge import Bridge
    from walk import walked

    hvd.init()
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(8)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), algorithm="gradient_allreduce"), loss="mse")
    traced, ran, call = {}, {}, Bridge._call

    def watched(bridge, *arguments):        # on threads of TensorFlow, each of which has a profiler of its own
        with walked(ran):
            return call(bridge, *arguments)

    x = np.ones((32, 8), "float32")
    with walked(traced):
        model.fit(x, x, batch_size=8, verbose=0)
    Bridge._call = watched
    model.fit(x, x, batch_size=8, verbose=0)
    assert sorted({*traced, *ran}) == expected


@pytest.mark.parametrize(("framework", "walk", "most"), [("torch", walk_torch, 10), ("tensorflow", walk_fit, 14)])
def test_files(run_ranks, framework, walk, most):
    pytest.importorskip(framework)
    files = of_page()[framework != "torch"]
    assert len(files) <= most
    run_ranks(2, walk, arguments={"expected": sorted(files)}, framework=framework)
