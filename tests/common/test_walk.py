"""The files that a gradient passes through to the core, with a function that takes it, or a bucket of it."""
import pytest

STEPS = 4
TORCH = ["algorithms/bytegrad.py", "core/operations.py", "primitives.py", "reduction/window.py", "torch/backward.py",
         "torch/frontend.py", "torch/source.py", "training/buckets.py"]
FIT = ["_keras/optimizer.py", "_keras/reduction.py", "algorithms/gradient_allreduce.py", "core/operations.py",
       "primitives.py", "reduction/window.py", "tensorflow/bridge.py", "tensorflow/graphs.py",
       "tensorflow/reduction.py", "tensorflow/step.py", "training/buckets.py"]


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
        with walked(found if step == STEPS - 1 else {}):        # ranks agree in the first step
            loss.backward()
        optimizer.step()
    assert sorted(found) == expected


def walk_fit(expected):
    import keras
    import numpy as np

    import bagua_hvd.tensorflow.keras as hvd
    from bagua_hvd.tensorflow import bridge
    from walk import walked

    hvd.init()
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(8)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), algorithm="gradient_allreduce"), loss="mse")
    traced, ran, run = {}, {}, bridge._run

    def watched(*arguments):        # TensorFlow calls it on threads, each with its own profiler
        with walked(ran):
            return run(*arguments)

    x = np.ones((32, 8), "float32")
    with walked(traced):
        model.fit(x, x, batch_size=8, verbose=0)
    bridge._run = watched
    model.fit(x, x, batch_size=8, verbose=0)
    assert sorted({*traced, *ran}) == expected


@pytest.mark.parametrize(("framework", "walk", "files"), [("torch", walk_torch, TORCH), ("tensorflow", walk_fit, FIT)])
def test_files(run_ranks, framework, walk, files):
    pytest.importorskip(framework)
    run_ranks(2, walk, arguments={"expected": files}, framework=framework)
