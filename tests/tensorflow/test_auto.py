"""Auto in TensorFlow and Keras switches plans within a compiled step, without tracing it again."""
import pytest

tf = pytest.importorskip("tensorflow")

import numpy as np  # noqa: E402

import bagua_hvd.tensorflow as hvd  # noqa: E402
from bagua_hvd.algorithms import Auto  # noqa: E402
from bagua_hvd.tuning import tuner  # noqa: E402
from bagua_hvd.tuning.predict import Window  # noqa: E402

pytestmark = pytest.mark.timeout(200)
STEPS = 60


def to_and_fro(auto):
    """Predicts a speedup for block(4) with error feedback that does not come. Returns a function: the plans used."""
    plans = []
    tuner.window = lambda *_: Window(10_000, 9_000, 5_000, (5_000,), (1.0,))
    tuner.Tuner.predict = lambda self, figures, measured: [
        figures.step // 2 if plan.name.startswith("block(4)") and plan.bucket_bytes is None else 2 * figures.step
        for plan in self._plans]
    stepped = tuner.Tuner.stepped

    def noting(self):
        stepped(self)
        plans.append(self.plan.name)

    tuner.Tuner.stepped = noting
    return lambda: list(dict.fromkeys(plans)) if len(plans) == STEPS and plans[-1] == plans[0] else plans


EXPECTED = ["gradient_allreduce", "block(4) with error feedback"]


def gradient_of(rank, step):
    return np.random.default_rng([rank, step]).standard_normal((30, 20)).astype(np.float32)


def compiled():
    hvd.init()
    auto = Auto(up_to="E2", window=2)
    plans = to_and_fro(auto)
    x = tf.Variable(tf.zeros((30, 20)))
    import keras

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.125), algorithm=auto)
    traced = []

    @tf.function
    def step(gradient):
        traced.append(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * gradient)
        optimizer.apply_gradients([(tape.gradient(loss, x), x)])

    for number in range(STEPS):
        step(tf.constant(gradient_of(hvd.rank(), number)))
    assert plans() == EXPECTED and len(traced) <= 2, (plans(), traced)
    total = sum(gradient_of(rank, number) for rank in range(hvd.size()) for number in range(STEPS))
    np.testing.assert_allclose(x.numpy(), -0.125 / hvd.size() * total, rtol=1e-4, atol=2e-4)


def test_a_compiled_step(run_ranks):
    run_ranks(2, compiled, timeout=150)


def fitted():
    import keras

    import bagua_hvd.keras as hvd_keras

    hvd_keras.init()
    auto = Auto(up_to="E2", window=2)
    plans = to_and_fro(auto)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16, activation="relu"),
                              keras.layers.Dense(1)])
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.01), algorithm=auto), loss="mse")
    values = np.random.default_rng(hvd_keras.rank()).standard_normal((STEPS * 4, 8)).astype(np.float32)
    model.fit(values, values.sum(axis=1), batch_size=4, epochs=1, verbose=0, shuffle=False)
    assert plans() == EXPECTED, plans()
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    kept = [np.asarray(each) for each in hvd_keras.allgather(model.get_weights()[0][None])]
    assert np.array_equal(kept[0], kept[1])


def test_fit(run_ranks):
    run_ranks(2, fitted, timeout=150)
