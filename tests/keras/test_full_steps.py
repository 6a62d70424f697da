"""Full steps give the Adam of Keras its variance, too: in graphs as in eager mode, for both kinds of algorithm."""
import keras
import numpy as np
import pytest

import bagua_hvd.tensorflow.keras as hvd
from bagua_hvd import algorithms
from keras_training import MODES, data_of, flat, make_model

FULL_STEPS, BETA2 = 2, 0.99


def variances(optimizer):
    return np.concatenate([np.asarray(v).ravel() for v in optimizer._velocities])


def train(name, mode, full_steps):
    """(weights, Adam's variances) after twelve steps."""
    model, adam = make_model(), keras.optimizers.Adam(0.01, beta_2=BETA2)
    optimizer = hvd.DistributedOptimizer(adam, algorithm=algorithms.get(name, full_steps=full_steps))
    model.compile(optimizer, "mse", **MODES[mode])
    model.fit(*data_of(hvd.rank()), batch_size=5, epochs=3, verbose=0, shuffle=False)
    return flat(model), variances(model.optimizer)


def modes():
    hvd.init()
    for name in ("local_sgd", "powersgd"):
        by_mode = {mode: train(name, mode, FULL_STEPS) for mode in ("eager", "graph")}
        for mode, values in by_mode.items():
            for value, wanted in zip(values, by_mode["eager"], strict=True):
                np.testing.assert_allclose(value, wanted, rtol=2e-3, atol=1e-5, err_msg=f"{name}, {mode}")
        assert not np.allclose(by_mode["graph"][1], train(name, "graph", 0)[1], rtol=1e-2), name


@pytest.mark.long
@pytest.mark.parametrize("n", [2])
def test_modes_agree(run_ranks, n):
    run_ranks(n, modes, timeout=110)
