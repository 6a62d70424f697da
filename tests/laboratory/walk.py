"""The cost of a steady step of a small model in Python: files, functions and calls of bagua_hvd.

    baguarun -np 2 python -m tests.laboratory.walk torch
    KERAS_BACKEND=torch baguarun -np 2 python -m tests.laboratory.walk keras

torch: backward() and step() of a model with two parameters. keras: the eager apply_gradients() of the same model.
tests/common/test_walk.py limits the files that receive a gradient; here every function of the package counts.
"""
import argparse
import os
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import bagua_hvd

PACKAGE = f"{Path(bagua_hvd.__file__).parent}{os.sep}"
STEADY = 5      # steps before the counted one


@contextmanager
def counted(calls: Counter):
    """Counts this thread's calls within the context by (file, function)."""
    def see(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_qualname] += 1

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


def torch_step():
    """The calls by phase of a step."""
    import torch

    import bagua_hvd.torch as hvd

    hvd.init()
    model = torch.nn.Linear(8, 8)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    found = {}
    for _ in range(STEADY + 1):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).sum()
        found = {"backward": Counter(), "step": Counter()}
        with counted(found["backward"]):
            loss.backward()
        with counted(found["step"]):
            optimizer.step()
    return hvd.rank(), found


def keras_step():
    """Like torch_step()."""
    import keras

    import bagua_hvd.keras as hvd

    if keras.backend.backend() == "tensorflow":
        import bagua_hvd.tensorflow  # noqa: F401  (registers its reductions)
    hvd.init()
    variables = [keras.Variable(keras.ops.ones(shape)) for shape in ((8, 8), (8,))]
    optimizer, found = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), {}
    for _ in range(STEADY + 1):
        gradients = [keras.ops.ones(variable.shape) for variable in variables]
        found = {"apply": Counter()}
        with counted(found["apply"]):
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    return hvd.rank(), found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=("torch", "keras"))
    parser.add_argument("--functions", action="store_true", help="names them")
    arguments = parser.parse_args()
    rank, found = torch_step() if arguments.framework == "torch" else keras_step()
    if rank != 0:
        return
    for phase, calls in found.items():
        print(f"{phase}: {len({file for file, _ in calls})} files, {len(calls)} functions, {calls.total()} calls")
        if arguments.functions:
            for (file, function), count in sorted(calls.items()):
                print(f"  {file:40} {function:50} {count}")


if __name__ == "__main__":
    main()
