"""Embeddings train equally whatever the number of ranks, the compiler, and the format of gradients.

Expected: plain Keras with dense gradients. Optimizers of Keras 3 square each row of IndexedSlices, so duplicate indices
must be merged.
"""
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import bagua_hvd.tensorflow as hvd

ROWS, STEPS = np.array([[0, 1, 0, 0], [3, 1, 1, 2]]), 3       # equal on all ranks, so their mean is each rank's
OPTIMIZERS = {
    "SGD": {"momentum": 0.9}, "Adam": {}, "RMSprop": {"momentum": 0.5}, "Adagrad": {},
}


def make_model(layers):
    model = layers.Sequential([layers.Input((4,)), layers.layers.Embedding(5, 2), layers.layers.Flatten(),
                               layers.layers.Dense(1)])
    model.set_weights([np.linspace(-1, 1, weight.size, dtype="float32").reshape(weight.shape)
                       for weight in model.get_weights()])
    return model


def train(layers, optimizer, jit=False, tape_of=lambda tape: tape, dense=False):
    """The embedding after some steps."""
    model = make_model(layers)

    @tf.function(jit_compile=jit)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(ROWS) - 1.0))
        gradients = tape_of(tape).gradient(loss, model.trainable_variables)
        if dense:
            gradients = list(map(tf.convert_to_tensor, gradients))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    optimizer.build(model.trainable_variables)
    for _ in range(STEPS):
        step()
    return model.get_weights()[0]


def table(layers):
    hvd.init()
    for name, options in OPTIMIZERS.items():
        make = getattr(layers.optimizers, name)
        expected = train(layers, make(0.05, **options), dense=True)
        for jit, dense in itertools.product((False, True), repeat=2):
            wrapped = hvd.DistributedOptimizer(make(0.05, **options), sparse_as_dense=dense)
            found = {"optimizer": train(layers, wrapped, jit)}
            if name == "Adam":
                found["tape"] = train(layers, make(0.05), jit, lambda tape, dense=dense: hvd.DistributedGradientTape(
                    tape, sparse_as_dense=dense))
            for who, weights in found.items():
                np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6,
                                           err_msg=f"{who} {name} jit={jit} sparse_as_dense={dense}")


def with_keras():
    table(keras)


def with_tf_keras():
    import tf_keras

    table(tf_keras)


@pytest.mark.timeout(260)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_embeddings(run_ranks, n):
    run_ranks(n, with_keras, timeout=240)


@pytest.mark.timeout(260)
@pytest.mark.parametrize("n", [1, 2])
def test_embeddings_of_tf_keras(run_ranks, n):
    pytest.importorskip("tf_keras")
    run_ranks(n, with_tf_keras, timeout=240, env={"TF_USE_LEGACY_KERAS": "1"})


def uneven():
    """Ranks have different rows, in different numbers: each index of any rank appears once, with the mean."""
    hvd.init()
    rank = hvd.rank()
    weights = tf.Variable(tf.ones([6, 1]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(weights, [[4, 4, 1], [1]][rank]) * (rank + 1.0))
    gradient = hvd.DistributedGradientTape(tape).gradient(loss, weights)
    found = dict(zip(gradient.indices.numpy().tolist(), gradient.values.numpy()[:, 0].tolist(), strict=True))
    assert found == {4: 1.0, 1: 1.5}, found
    # hvd.allreduce() itself keeps every row of every rank, as Horovod does.
    plain = hvd.allreduce(tf.IndexedSlices(tf.ones([2, 1]), [3, 3], [6, 1]))
    assert plain.indices.numpy().tolist() == [3] * 4


def test_different_rows(run_ranks):
    run_ranks(2, uneven)
