"""Full steps give Keras' Adam its variance, too: in graphs as in eager mode, for both kinds of algorithm."""
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
    return train_by(algorithms.get(name, full_steps=full_steps), mode)


def train_by(algorithm, mode, around=lambda optimizer: optimizer):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01, beta_2=BETA2), algorithm=algorithm)
    model.compile(around(optimizer), "mse", **MODES[mode])
    model.fit(*data_of(hvd.rank()), batch_size=5, epochs=3, verbose=0, shuffle=False)
    return flat(model), variances(optimizer)


def modes():
    hvd.init()
    for name in ("local_sgd", "powersgd"):
        by_mode = {mode: train(name, mode, FULL_STEPS) for mode in ("eager", "graph")}
        for mode, values in by_mode.items():
            for value, wanted in zip(values, by_mode["eager"], strict=True):
                np.testing.assert_allclose(value, wanted, rtol=2e-3, atol=1e-5, err_msg=f"{name}, {mode}")
        assert not np.allclose(by_mode["graph"][1], train(name, "graph", 0)[1], rtol=1e-2), name


def loss_scaling():
    hvd.init()
    algorithm = algorithms.LocalSGD(full_steps=FULL_STEPS)

    def scaled(optimizer):
        return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=256.0)

    own = train("local_sgd", "graph", 0)[1]
    of_scaled = train_by(algorithm, "graph", scaled)[1]
    assert of_scaled.max() < 10 * own.max()         # instead of 256^2 times
    for value, wanted in zip(train_by(algorithm, "graph"), train("local_sgd", "graph", FULL_STEPS), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5)


def test_loss_scaling_of_one_optimizer_leaves_the_variance_of_others(run_ranks):
    run_ranks(2, loss_scaling, timeout=110)


@pytest.mark.long
@pytest.mark.parametrize("n", [2])
def test_modes_agree(run_ranks, n):
    run_ranks(n, modes, timeout=110)
