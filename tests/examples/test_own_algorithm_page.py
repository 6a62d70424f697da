"""The algorithm of docs/own-algorithm.md, and one that reads weights in communicate(), are equal in every front end."""
import functools
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs" / "own-algorithm.md"
STEPS, RATE, SIZE = 6, 0.5, 3
FORMS = {
    "torch": ["torch"],
    "tensorflow": ["eager", "graph", "xla", "v1", "fit", "fit eagerly", "fit tf_keras", "fit tf_keras legacy"],
    "keras on torch": ["fit"],
}


@functools.cache
def of_page():
    """The class of the page's first code block."""
    found = {}
    exec(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1], found)
    return found["D2"]


def decay():
    from bagua_hvd.algorithms import Algorithm
    from bagua_hvd.primitives import c_fp_s

    class Decay(Algorithm):
        """g = mean_i g_i + x / 2"""
        uses_weights = ("communicate",)

        def communicate(self, bucket, group):
            bucket.write(bucket.read() + bucket.flat(bucket.weights) / 2)
            return c_fp_s(bucket, group)

    return Decay


def centers(i):
    """Worker i's gradient in step t is (x - c_it) / 4."""
    return np.random.default_rng(i).normal(size=(STEPS, SIZE)).astype("float32")


def simulate_page(n):
    """D2's equation: the final weights of all workers, one row for each."""
    x, kept = np.zeros((n, SIZE)), 0.0
    for t in range(STEPS):
        h = x - RATE * np.array([(x[i] - centers(i)[t]) / 4 for i in range(n)])
        corrected = h + kept
        mean = np.array([(corrected[i - 1] + corrected[i] + corrected[(i + 1) % n]) / 3 for i in range(n)])
        x = (corrected + mean) / 2
        kept = x - h
    return x


def simulate_decay(n):
    x = np.zeros(SIZE)
    for t in range(STEPS):
        x = x - RATE * (np.mean([(x - centers(i)[t]) / 4 for i in range(n)], axis=0) + x / 2)
    return np.tile(x, (n, 1))


ALGORITHMS = {"page": (of_page, simulate_page), "weights in communicate": (decay, simulate_decay)}


def train_torch(algorithm, data):
    import torch

    import bagua_hvd.torch as hvd

    x = torch.nn.Parameter(torch.zeros(SIZE))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=RATE), algorithm=algorithm)
    for center in torch.from_numpy(data):
        optimizer.zero_grad()
        (((x - center) ** 2).sum() / 8).backward()
        optimizer.step()
    return x.detach().numpy()


def train_loop(form, algorithm, data):
    import keras
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    v1 = form == "v1"
    x = tf.Variable(tf.zeros(SIZE)) if v1 else keras.Variable(tf.zeros(SIZE))
    plain = tf.compat.v1.train.GradientDescentOptimizer(RATE) if v1 else keras.optimizers.SGD(RATE)
    optimizer = hvd.DistributedOptimizer(plain, algorithm=algorithm)
    if not v1:
        optimizer.build([x])

    def step(center):
        if v1:
            optimizer.minimize(lambda: tf.reduce_sum((x - center) ** 2) / 8, var_list=[x])
        else:
            optimizer.apply_gradients([((x.value - center) / 4, x)])

    step = {"graph": tf.function(step), "xla": tf.function(step, jit_compile=True)}.get(form, step)
    for center in tf.constant(data):
        step(center)
    return np.array(x)


def train_fit(form, algorithm, data):
    if "tf_keras" in form:
        import tf_keras as keras

        plain = (keras.optimizers.legacy if "legacy" in form else keras.optimizers).SGD(RATE)
    else:
        import keras

        plain = keras.optimizers.SGD(RATE)
    import bagua_hvd.keras as hvd

    class Difference(keras.layers.Layer):
        def build(self, shape):
            self.x = self.add_weight(name="x", shape=(SIZE,), initializer="zeros")

        def call(self, inputs):
            return self.x - inputs

    model = keras.Sequential([Difference()])
    model.build((None, SIZE))
    model.compile(hvd.DistributedOptimizer(plain, algorithm=algorithm), lambda _, y: (y[:, 0]**2 + y[:, 1]**2
                  + y[:, 2]**2) / 8, run_eagerly="eagerly" in form)
    model.fit(data, data, batch_size=1, epochs=1, shuffle=False, verbose=0)
    return model.get_weights()[0]


def trains(which, framework):
    from bagua_hvd.job import basics

    basics.init()
    make, simulate = ALGORITHMS[which]
    expected = simulate(basics.size())[basics.rank()]
    for form in FORMS[framework]:
        if "tf_keras" in form:
            pytest.importorskip("tf_keras")
        data = centers(basics.rank())
        x = train_torch(make()(), data) if form == "torch" else \
            (train_fit if form.startswith("fit") else train_loop)(form, make()(), data)
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6, err_msg=form)


@pytest.mark.parametrize("framework", [
    "torch", *(pytest.param(one, marks=pytest.mark.long) for one in ("tensorflow", "keras on torch"))])
@pytest.mark.parametrize("which", ALGORITHMS)
def test_in_every_front_end(run_ranks, which, framework):
    pytest.importorskip(framework.split()[0])
    run_ranks(3, trains, arguments={"which": which, "framework": framework}, framework=framework)
