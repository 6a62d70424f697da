"""Several reductions of the gradients of the same variables in one traced function."""
import keras
import numpy as np
import pytest
import tensorflow as tf

import bagua_hvd.keras as hvd_keras
import bagua_hvd.tensorflow as hvd

PARTS = 4


def data_of(rank):
    x = np.random.default_rng(rank).normal(size=(16, 4)).astype("float32")
    return x, x.sum(-1, keepdims=True)


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])


def gradients(model, x, y, wrap=lambda tape: tape):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    return wrap(tape).gradient(loss, model.trainable_variables)


def micro_batches(jit):
    """A Python loop over parts of the batch, each with a distributed tape; the first one in a condition."""
    model, optimizer = make_model(), keras.optimizers.SGD(0.1)
    variables = model.trainable_variables

    def part(x, y):
        return gradients(model, x, y, hvd.DistributedGradientTape)

    @tf.function(jit_compile=jit)
    def step(x, y):
        first, *rest = zip(tf.split(x, PARTS), tf.split(y, PARTS), strict=True)
        sums = tf.cond(tf.reduce_all(x < 1e6), lambda: part(*first), lambda: list(map(tf.zeros_like, variables)))
        for pair in rest:
            sums = [total + gradient for total, gradient in zip(sums, part(*pair), strict=True)]
        optimizer.apply_gradients(zip(sums, variables, strict=True))
        return sums

    for _ in range(5):
        mean = [sum(each) / hvd.size() for each in zip(
            *(gradients(model, *data_of(rank)) for rank in range(hvd.size())), strict=True)]
        for found, expected in zip(step(*data_of(hvd.rank())), mean, strict=True):
            np.testing.assert_allclose(found / PARTS, expected, rtol=1e-4, atol=1e-6)


class Critic(keras.Model):
    """Updates itself several times in each train_step(), as WGAN-GP's critic does."""

    def __init__(self):
        super().__init__()
        self.net = make_model()

    def train_step(self, data):
        x, y = data
        for _ in range(3):
            self.optimizer.apply(gradients(self.net, x, y), self.net.trainable_variables)
        return {"loss": tf.reduce_mean(tf.square(self.net(x) - y))}


def updates(jit):
    x, y = data_of(hvd.rank())
    critic = Critic()
    critic.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=jit)
    critic.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)

    alone, optimizer = make_model(), keras.optimizers.SGD(0.1)
    for begin in (0, 8, 0, 8):
        x, y = (np.concatenate([data_of(rank)[which][begin:begin + 8] for rank in range(hvd.size())])
                for which in (0, 1))
        for _ in range(3):
            optimizer.apply(gradients(alone, x, y), alone.trainable_variables)
    for found, expected in zip(critic.net.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def run(jit):
    hvd.init()
    micro_batches(jit)
    updates(jit)


@pytest.mark.timeout(260)
@pytest.mark.parametrize("jit", [False, True])
def test_repeated_reductions(run_ranks, jit):
    run_ranks(2, run, arguments={"jit": jit}, timeout=240)
