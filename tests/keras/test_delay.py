"""delay=1 in Keras' fit() applies the mean gradient of the step before, compared with NumPy; also across saving."""
import keras
import numpy as np
import pytest

import bagua_hvd.tensorflow.keras as hvd
from keras_training import MODES, assert_same_everywhere, data_of, flat, make_model

BATCH, LR = 5, 0.25


def linear():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, use_bias=False, kernel_initializer="ones")])
    return model


def pipe_sgd(n, epochs):
    """The kernel after training with the loss mean((x w - y)^2) over a batch and its columns."""
    w, late = np.ones((6, 3)), np.zeros((6, 3))
    for t in range(4 * epochs):
        sent = []
        for rank in range(n):
            x, y = (part[BATCH * (t % 4):][:BATCH].astype(float) for part in data_of(rank))
            sent.append(2 * x.T @ (x @ w - y) / y.size)
        w, late = w - LR * late, np.mean(sent, 0)
    return w


def training():
    hvd.init()
    for mode in MODES:
        model = linear()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(LR), delay=1), "mse", **MODES[mode])
        model.fit(*data_of(hvd.rank()), batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
        np.testing.assert_allclose(flat(model).reshape(6, 3), pipe_sgd(hvd.size(), 2), rtol=1e-4, atol=1e-5)
        assert_same_everywhere(model)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="delay=1 cannot serve a LossScaleOptimizer.*mixed_bfloat16"):
        hvd.DistributedOptimizer(scaled, delay=1)
    model.compile(keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(), delay=1)), "mse")
    with pytest.raises(ValueError, match="delay=1 cannot serve a LossScaleOptimizer"):
        model.train_on_batch(*data_of(0))


@pytest.mark.parametrize("n", [2, 3])
def test_training(run_ranks, n):
    run_ranks(n, training, timeout=110)


def saved(folder, algorithm):
    """A saved model resumes with the averages that were in flight; loading it without delay drops them."""
    hvd.init()
    path = f"{folder}/{hvd.rank()}.keras"

    def go_on(model):
        model.fit(*data_of(hvd.rank()), batch_size=BATCH, epochs=1, verbose=0, shuffle=False)
        return flat(model)

    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(LR), delay=1, algorithm=algorithm)
    model.compile(optimizer, "mse", jit_compile=False)
    go_on(model)
    if hvd.rank() == 0:
        model.save(path)                                # alone: the other ranks are not needed
    hvd.allreduce(np.zeros(1))
    if hvd.rank() == 1:
        model.save(path)
    expected = go_on(model)
    np.testing.assert_array_equal(go_on(hvd.load_model(path, algorithm=algorithm, delay=1)), expected)
    assert (go_on(hvd.load_model(path, algorithm=algorithm)) != expected).any()


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "powersgd"])
def test_saved(run_ranks, tmp_path, algorithm):
    run_ranks(2, saved, arguments={"folder": str(tmp_path), "algorithm": algorithm})
