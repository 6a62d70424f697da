"""Models, data and checks for tests of Keras front ends. The caller selects Keras' backend."""
import keras
import numpy as np

from bagua_hvd._keras import api

MODES = {"eager": {"run_eagerly": True}, "graph": {"jit_compile": False}, "xla": {"jit_compile": True}, "default": {}}


def make_model(seed=0, **kwargs):
    """Maps six numbers to three."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential([
        keras.Input((6,)), keras.layers.Dense(8, "tanh", **kwargs), keras.layers.Dense(3, **kwargs)
    ])


def data_of(rank, rows=20):
    """Inputs and targets of one rank, different on each."""
    random = np.random.default_rng(rank)
    return random.normal(size=(rows, 6)).astype("float32"), random.normal(size=(rows, 3)).astype("float32")


def data_of_all(size, batch_size, rows=20):
    """All ranks' data, ordered so that a batch of size * batch_size rows has one batch of each rank."""
    parts = [data_of(rank, rows) for rank in range(size)]
    return tuple(
        np.concatenate([part[which][i:i + batch_size] for i in range(0, rows, batch_size) for part in parts])
        for which in (0, 1)
    )


def clone(optimizer):
    return type(optimizer).from_config(optimizer.get_config())


def flat(model):
    return np.concatenate([weight.flatten() for weight in model.get_weights()])


def assert_same_everywhere(model):
    """All weights are bit-identical on all ranks, and finite."""
    mine = flat(model)
    everyone = api.allgather(mine[None])
    assert np.isfinite(mine).all()
    assert (everyone == everyone[0]).all()


def assert_near(model, expected, algorithm="gradient_allreduce", **tolerance):
    """The weights match up to rounding, or up to the algorithm's own error."""
    if not tolerance:
        exact = algorithm == "gradient_allreduce"
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if exact else {"rtol": 0, "atol": 0.05}
    np.testing.assert_allclose(flat(model), flat(expected), **tolerance)
