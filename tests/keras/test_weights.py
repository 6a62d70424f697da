"""set_weight() in Keras' fit() and on tapes: unequal batches train as one process on all the data."""
import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import bagua_hvd.tensorflow as hvd_tape
import bagua_hvd.tensorflow.keras as hvd
from keras_training import MODES, data_of, flat, make_model

# Rows in a batch of each rank.
BATCH = (4, 1, 7)
STEPS = 3


class Weighted(keras.Sequential):
    def train_step(self, data):
        self.optimizer.set_weight(keras.ops.shape(data[0])[0])
        return super().train_step(data)


def batches_of(rank):
    x, y = data_of(rank, rows=BATCH[rank] * STEPS)
    return [(x[i:i + BATCH[rank]], y[i:i + BATCH[rank]]) for i in range(0, len(x), BATCH[rank])]


def everyones():
    return [tuple(map(np.concatenate, zip(*parts, strict=True)))
            for parts in zip(*map(batches_of, range(hvd.size())), strict=True)]


def alone(make):
    model = make_model()
    model.compile(make(), "mse", jit_compile=False)
    for x, y in everyones():
        model.train_on_batch(x, y)
    return flat(model)


def fit(mode):
    hvd.init()
    for make in (functools.partial(keras.optimizers.SGD, 0.1), functools.partial(keras.optimizers.Adam, 0.01)):
        model = Weighted(make_model().layers)
        model.compile(hvd.DistributedOptimizer(make()), "mse", **MODES[mode])
        model.fit(*data_of(hvd.rank(), rows=BATCH[hvd.rank()] * STEPS), batch_size=BATCH[hvd.rank()], verbose=0,
                  shuffle=False)
        np.testing.assert_allclose(flat(model), alone(make), rtol=1e-5, atol=1e-6)


LONG = [pytest.param(mode, marks=pytest.mark.long) for mode in ("eager", "xla")]


@pytest.mark.timeout(260)
@pytest.mark.parametrize("mode", ["graph", *LONG])
def test_fit(run_ranks, mode):
    run_ranks(3, fit, arguments={"mode": mode}, framework="tensorflow", timeout=240)


def outside():
    """A weight that a graph would make constant is refused; wrong weights raise errors on all ranks, also under XLA."""
    hvd.init()
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    model.optimizer.set_weight(3)
    with pytest.raises(ValueError, match=r"call it in train_step\(\), where the step is traced"):
        model.fit(*data_of(0), verbose=0)
    variable = tf.Variable([1.0, 2.0])

    def gradient(weight, **options):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * (hvd.rank() + 1.0))
        tape = hvd_tape.DistributedGradientTape(tape, **options)
        tape.set_weight(weight)
        return tape.gradient(loss, [variable])[0]

    xla = tf.function(gradient, jit_compile=True)
    for compiled in (gradient, tf.function(gradient), xla):
        for weights, sentence in (((1, -2, 3), "rank 1 gave an invalid one"), ((math.nan, 1, 1), "rank 0 gave"),
                                  ((0, 0, 0), "all ranks are 0")):
            with pytest.raises(tf.errors.InvalidArgumentError if compiled is not xla else tf.errors.InternalError,
                               match=sentence):
                compiled(tf.constant(weights[hvd.rank()], tf.float32))
        result = compiled(tf.constant(hvd.rank(), tf.float32))
        np.testing.assert_allclose(result, [(1 * 2 + 2 * 3) / 3] * 2, rtol=1e-6)
    with pytest.raises(ValueError, match="op=hvd.Average"):
        gradient(1, op=hvd_tape.Sum)
    # The wrapper that compile() uses with dtype policy mixed_float16 has the same methods.
    scaled, alone = keras.Variable(0.0), keras.Variable(0.0)
    optimizer = keras.optimizers.LossScaleOptimizer(
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), algorithm="bytegrad"), initial_scale=2.0)
    assert type(optimizer.algorithm).__name__ == "ByteGrad"
    optimizer = keras.optimizers.LossScaleOptimizer(
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), initial_scale=2.0)
    optimizer.register_local_var(alone)
    optimizer.build([scaled, alone])
    optimizer.set_weight(hvd.rank())
    optimizer.apply([tf.constant(2.0 * hvd.rank())] * 2, [scaled, alone])
    np.testing.assert_allclose(scaled, -5 / 3, rtol=1e-6)
    assert alone == -hvd.rank() / 3 * hvd.rank()
    no_samples()


def no_samples():
    """NaN of a rank without samples is ignored; embeddings and local variables are weighted, too."""
    table, local, weights = tf.Variable(tf.zeros([4, 2])), tf.Variable(1.0), tf.Variable(2.0)
    rank, size = hvd.rank(), hvd.size()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [rank])) + weights * (math.nan if rank == 0 else rank) + local
    tape = hvd_tape.DistributedGradientTape(tape)
    tape.register_local_source(local)
    tape.set_weight(rank)
    rows, alone, dense = tape.gradient(loss, [table, local, weights])
    total = sum(range(size))
    np.testing.assert_allclose(dense, sum(r * r for r in range(size)) / total, rtol=1e-6)
    np.testing.assert_allclose(alone, rank / total, rtol=1e-6)
    np.testing.assert_allclose(tf.convert_to_tensor(rows)[:size], [[r / total] * 2 for r in range(size)], rtol=1e-6)


@pytest.mark.timeout(260)
def test_outside(run_ranks):
    run_ranks(3, outside, framework="tensorflow", timeout=240)


def one_rank():
    """It reduces nothing, and its weights are checked all the same."""
    hvd.init()
    variable, table = tf.Variable([1.0, 2.0]), tf.Variable(tf.zeros([4, 2]))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    trained = keras.Variable(1.0)
    optimizer.build([trained])

    def gradients(weight):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * 3.0) + tf.reduce_sum(tf.gather(table, [1]))
        tape = hvd_tape.DistributedGradientTape(tape)
        tape.set_weight(weight)
        return [tf.convert_to_tensor(each) for each in tape.gradient(loss, [variable, table])]

    def step(weight):
        optimizer.set_weight(weight)
        optimizer.apply([tf.constant(1.0)], [trained])

    compiled = functools.partial(tf.function, jit_compile=True)
    for wrapped in (lambda function: function, tf.function, compiled):
        error = tf.errors.InternalError if wrapped is compiled else tf.errors.InvalidArgumentError
        trained.assign(1.0)
        for function in (wrapped(gradients), wrapped(step)):
            for weight, sentence in ((-1, "finite and not negative"), (math.nan, "finite"), (0, "all ranks are 0")):
                with pytest.raises(error, match=sentence):
                    function(tf.constant(weight, tf.float32))
            assert trained == 1.0 or wrapped is compiled    # such a program changes weights when it fails, too
            trained.assign(1.0)
            function(tf.constant(2.0))
        assert trained == 0.0
        dense, rows = wrapped(gradients)(tf.constant(2.0))
        np.testing.assert_array_equal(dense, [3.0, 3.0])
        np.testing.assert_array_equal(rows, [[0, 0], [1, 1], [0, 0], [0, 0]])


def test_one_rank(run_ranks):
    run_ranks(1, one_rank, framework="tensorflow")


def accumulated():
    hvd.init()
    make = functools.partial(keras.optimizers.SGD, 0.1)
    model = Weighted(make_model().layers)
    model.compile(hvd.DistributedOptimizer(make(), backward_passes_per_step=2, average_aggregated_gradients=True),
                  "mse", jit_compile=False)
    for x, y in batches_of(hvd.rank()):
        for _ in range(2):      # the same batch twice, which equals its mean
            model.train_on_batch(x, y)
    np.testing.assert_allclose(flat(model), alone(make), rtol=1e-5, atol=1e-6)


@pytest.mark.timeout(260)
def test_accumulated(run_ranks):
    run_ranks(3, accumulated, framework="tensorflow", timeout=240)


def joined():
    """A rank in join() has no weight: with its two batches it trains as one process on all the data does."""
    hvd.init()
    rank, steps = hvd.rank(), 2 if hvd.rank() == 2 else STEPS
    make = functools.partial(keras.optimizers.SGD, 0.1)
    model, single = Weighted(make_model().layers), make_model()
    model.compile(hvd.DistributedOptimizer(make()), "mse", jit_compile=False)
    single.compile(make(), "mse", jit_compile=False)
    for step in range(STEPS):
        parts = [batches_of(each)[step] for each in range(3 if step < 2 else 2)]
        single.train_on_batch(*map(np.concatenate, zip(*parts, strict=True)))
    for x, y in batches_of(rank)[:steps]:
        model.train_on_batch(x, y)
    assert hvd_tape.join() != 2
    if rank < 2:
        np.testing.assert_allclose(flat(model), flat(single), rtol=1e-5, atol=1e-6)
    variable = tf.Variable(1.0)
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = variable * (rank + 1.0)
        tape = hvd_tape.DistributedGradientTape(tape)
        tape.set_weight(BATCH[rank])
        gradient = tape.gradient(loss, variable)
    hvd_tape.join()
    np.testing.assert_allclose(gradient, 27 / 12 if rank == 2 else 6 / 5, rtol=1e-6)


@pytest.mark.timeout(260)
def test_joined(run_ranks):
    run_ranks(3, joined, framework="tensorflow", timeout=240)
