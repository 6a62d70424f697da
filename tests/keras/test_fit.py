"""Keras' fit(), with different data on each rank: eager, in graphs, compiled by XLA, and in Keras' default mode.

Expected: plain Keras on the data of all ranks.
"""
import copy
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import bagua_hvd.tensorflow.keras as hvd
from bagua_hvd.algorithms import ByteGrad, LocalSGD
from keras_training import (
    MODES,
    assert_near,
    assert_same_everywhere,
    clone,
    data_of,
    data_of_all,
    flat,
    make_model,
)

BATCH = 5
SUBSET = hvd.ProcessSet([0])


def fit(model, optimizer, mode, epochs=2):
    model.compile(optimizer, "mse", **MODES[mode])
    model.fit(*data_of(hvd.rank()), batch_size=BATCH, epochs=epochs, verbose=0, shuffle=False)


def alone(optimizer, epochs=2, **kwargs):
    """A model trained by plain Keras on the data of all ranks."""
    model = make_model(**kwargs)
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(*data_of_all(hvd.size(), BATCH), batch_size=BATCH * hvd.size(), epochs=epochs, verbose=0, shuffle=False)
    return model


def optimizers_and_algorithms(mode):
    for optimizer in (keras.optimizers.SGD(0.1, momentum=0.9),
                      keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.3)):
        expected = alone(clone(optimizer))
        for algorithm in ("gradient_allreduce", "bytegrad"):
            model = make_model()
            opt = hvd.DistributedOptimizer(clone(optimizer), algorithm=algorithm)
            assert isinstance(opt, type(optimizer)) and type(opt).__name__ == type(optimizer).__name__
            fit(model, opt, mode)
            assert int(opt.iterations) == 8
            assert_same_everywhere(model)
            assert_near(model, expected, algorithm)
            if algorithm == "bytegrad":         # the codec is in use
                assert not np.allclose(flat(model), flat(expected), rtol=1e-6, atol=1e-7)


def options(mode):
    expected = alone(keras.optimizers.SGD(0.1))
    model = make_model()
    variables = model.trainable_variables
    for number, arguments in enumerate((
        {"groups": 2, "gradient_predivide_factor": 4.0}, {"groups": [variables[:1], variables[1:3]]},
        {"compression": hvd.Compression.fp16}, {"algorithm": ByteGrad(error_feedback=True)},
    )):
        model.set_weights(make_model().get_weights())
        fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **arguments), mode)
        assert_same_everywhere(model)
        assert_near(model, expected, "" if number >= 2 else "gradient_allreduce")
    # The sum over n ranks with a learning rate n times smaller, by a copy of the optimizer.
    model = make_model()
    fit(model, copy.deepcopy(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 / hvd.size()), op=hvd.Sum)), mode)
    assert_near(model, expected)
    # A rank that is not in the set trains alone.
    model = make_model()
    fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=SUBSET), mode)
    plain = make_model()
    fit(plain, keras.optimizers.SGD(0.1), mode)
    assert_near(model, plain)


def accumulation(mode):
    for average in (False, True):
        # Pairs of batches equal one batch of twice the size: the sum of two means is twice the mean of both.
        expected = make_model()
        expected.compile(keras.optimizers.SGD(0.1 if average else 0.2, momentum=0.9), "mse", jit_compile=False)
        expected.fit(*data_of_all(hvd.size(), 2 * BATCH), batch_size=2 * BATCH * hvd.size(), epochs=2, verbose=0,
                     shuffle=False)
        model = make_model()
        opt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), backward_passes_per_step=2,
                                       average_aggregated_gradients=average)
        fit(model, opt, mode)
        assert int(opt.iterations) == 8
        assert_same_everywhere(model)
        assert_near(model, expected)
    # An unfinished window leaves the weights unchanged.
    before = flat(model)
    x, y = data_of(hvd.rank())
    model.train_on_batch(x[:BATCH], y[:BATCH])
    assert (flat(model) == before).all()


def loss_scaling(mode):
    x, y = data_of(hvd.rank())
    for around, passes in ((True, 1), (False, 1), (True, 2)):
        model = make_model()
        if around:
            inner = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=passes,
                                             average_aggregated_gradients=True)
            opt = keras.optimizers.LossScaleOptimizer(inner, initial_scale=256.0)
        else:
            inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=256.0)
            opt = hvd.DistributedOptimizer(inner)
        fit(model, opt, mode)
        assert_same_everywhere(model)
        if passes == 1:
            assert_near(model, alone(keras.optimizers.SGD(0.1)))
        # An infinity on one rank: all ranks skip the step and halve the scale.
        before = flat(model)
        for _ in range(passes):
            model.train_on_batch(x * (np.inf if hvd.rank() == 0 else 1), y)
        assert (flat(model) == before).all()
        assert float(opt.dynamic_scale) == 128.0
        for _ in range(passes):
            model.train_on_batch(x, y)
        assert (flat(model) != before).any()
        assert_same_everywhere(model)
    # compile() wraps the optimizer in a LossScaleOptimizer.
    model = make_model(dtype="mixed_float16")
    keras.config.set_dtype_policy("mixed_float16")
    mixed = keras.Sequential(model.layers)
    keras.config.set_dtype_policy("float32")
    fit(mixed, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), mode)
    assert isinstance(mixed.optimizer, keras.optimizers.LossScaleOptimizer)
    assert mixed.layers[0].compute_dtype == "float16" and int(mixed.optimizer.iterations) > 0
    assert_same_everywhere(mixed)
    assert_near(mixed, alone(keras.optimizers.SGD(0.1)), rtol=0, atol=0.02)


def local_variables(mode):
    for scale in (True, False):
        model = make_model()
        opt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), scale_local_gradients=scale)
        local = model.layers[1].trainable_weights
        for variable in local:
            opt.register_local_var(variable)
        model.compile(opt, "mse", **MODES[mode])
        x, y = (array[:BATCH] for array in data_of(hvd.rank()))
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(model(x) - y))
        gradients = tape.gradient(loss, local)
        factor = 1 / hvd.size() if scale else 1
        expected = [v.numpy() - 0.1 * factor * g.numpy() for v, g in zip(local, gradients, strict=True)]
        model.train_on_batch(x, y)
        for variable, value in zip(local, expected, strict=True):
            np.testing.assert_allclose(variable.numpy(), value, rtol=1e-4, atol=1e-5)
            everyone = hvd.allgather(variable.numpy()[None])
            assert (everyone[0] != everyone[1]).any()
        for variable in model.layers[0].trainable_weights:
            everyone = hvd.allgather(variable.numpy()[None])
            assert (everyone[0] == everyone[1]).all()


def weights(mode):
    """Averages of weights before and after the step: plain SGD on averages is SGD on all data."""
    expected = alone(keras.optimizers.SGD(0.1))
    model = make_model()
    fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), algorithm=LocalSGD(1)), mode)
    assert_same_everywhere(model)
    assert_near(model, expected)
    # x' = mean(x) before the step; ranks then differ by their own gradients, and their mean is SGD on all data.
    model = make_model()
    fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), algorithm="decentralized"), mode)
    everyone = hvd.allgather(flat(model)[None])
    assert (everyone[0] != everyone[1]).any()
    np.testing.assert_allclose(everyone.mean(axis=0), flat(expected), rtol=0, atol=2e-2)


def embedding(mode):
    """Sparse gradients: rows are gathered, except under XLA; sums over several passes need dense ones."""
    def make():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((2,)), keras.layers.Embedding(7, 3), keras.layers.Flatten(),
                                 keras.layers.Dense(1)])

    x = np.array([[[0, 1], [1, 2]], [[3, 3], [2, 5]]][hvd.rank()])
    everyone = np.array([[0, 1], [3, 3], [1, 2], [2, 5]])
    for passes, batch_size in ((1, 2), (2, 4)):
        model = make()
        opt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=passes,
                                       average_aggregated_gradients=True, sparse_as_dense=passes > 1)
        model.compile(opt, "mse", **MODES[mode])
        model.fit(x, np.ones((2, 1)), batch_size=1, verbose=0, shuffle=False)
        assert_same_everywhere(model)
        expected = make()
        expected.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        expected.fit(everyone, np.ones((4, 1)), batch_size=batch_size, verbose=0, shuffle=False)
        assert_near(model, expected)


CELLS = (optimizers_and_algorithms, options, accumulation, loss_scaling, local_variables, weights, embedding)
# Compiling takes long and does not affect these.
NOT_COMPILED = (options, local_variables)
ALL = [cell.__name__ for cell in CELLS]


def run_cells(mode, names):
    hvd.init(process_sets=[SUBSET])
    for name in names:
        print(name, flush=True)
        globals()[name](mode)


@pytest.mark.timeout(260)
@pytest.mark.parametrize("mode, cells", [
    pytest.param("eager", ALL, marks=pytest.mark.long),
    ("eager", ["accumulation", "local_variables"]),
    pytest.param("graph", ALL, marks=pytest.mark.long),
    ("graph", ["loss_scaling", "weights"]),
    pytest.param("xla", [cell.__name__ for cell in CELLS if cell not in NOT_COMPILED], marks=pytest.mark.long),
    ("xla", ["embedding"])], ids=lambda value: value if isinstance(value, str) else str(len(value)))
def test_modes(run_ranks, mode, cells):
    run_ranks(2, run_cells, arguments={"mode": mode, "names": cells}, timeout=240)


def wraps_in_a_function():
    """AutoGraph, which rewrites functions that a tf.function calls, leaves the options as they are."""
    import bagua_hvd.keras

    hvd.init()
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    optimizers = [keras.optimizers.SGD(0.1) for _ in range(2)]
    made = []

    @tf.function
    def wrap(x):
        made.append(bagua_hvd.keras.DistributedOptimizer(optimizers[0]))
        made.append(bagua_hvd.keras.PartialDistributedOptimizer(optimizers[1], local_layers=[layer]))
        return x

    wrap(tf.constant(1.0))
    assert [optimizer.learning_rate.numpy() for optimizer in made] == [np.float32(0.1)] * 2


def test_wraps_in_a_function(run_ranks):
    run_ranks(1, wraps_in_a_function)


def windows():
    """A window's gradients are those of all its passes, and of no other window."""
    hvd.init()
    mean = (hvd.size() + 1) / 2
    mine = float(hvd.rank() + 1)

    def check(mode):
        first, second = variables = [keras.Variable(0.0), keras.Variable(0.0)]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        optimizer.build(variables)
        step = mode(lambda *gradients: optimizer.apply(list(gradients), variables))
        for number in (1, 2):
            step(tf.constant(5 * mine), None)
            step(None, tf.constant(7 * mine))
            assert (first.numpy(), second.numpy()) == (-5 * mean * number, -7 * mean * number)
        # An error in the last pass ends the window.
        step(tf.constant(1.0), tf.constant(1.0))
        optimizer.set_weight(-1.0)
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
            optimizer.apply([tf.constant(1.0)] * 2, variables)
        for _ in range(2):
            step(tf.constant(mine), tf.constant(mine))
        assert (first.numpy(), second.numpy()) == (-12 * mean, -16 * mean)
        # Calls may have different lists of variables.
        optimizer.apply([tf.constant(mine)], [first])
        optimizer.apply([tf.constant(mine)], [second])
        assert (first.numpy(), second.numpy()) == (-13 * mean, -17 * mean)

    check(lambda function: function)
    check(tf.function)
    # Graphs know the variables of the other lists too late, so they refuse them, unless each list has whole windows.
    first, second = variables = [keras.Variable(0.0, name="first"), keras.Variable(0.0, name="second")]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    optimizer.build(variables)

    def apply_to(*lists):
        return tf.function(lambda: [optimizer.apply([tf.constant(mine)], [variable]) for variable in lists])

    for step in map(apply_to, variables):
        step()
        step()
    assert (first.numpy(), second.numpy()) == (-2 * mean, -2 * mean)
    optimizer.apply([tf.constant(mine)], [first])
    for lists in ([second], [first, second]):
        with pytest.raises(ValueError, match="first has a gradient from an earlier pass"):
            apply_to(*lists)()
        optimizer.distribution.reset()


def test_windows(run_ranks):
    run_ranks(2, windows)


def compiled_again():
    """Compiling a model again releases the buckets and the algorithm's state of its previous optimizer."""
    hvd.init()
    model, gone = make_model(), []
    for mode in MODES:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), algorithm=ByteGrad(error_feedback=True))
        fit(model, optimizer, mode, epochs=1)
        gone += map(weakref.ref, optimizer.distribution.reduction.reducers())
        del optimizer
    fit(model, keras.optimizers.SGD(0.01), mode, epochs=1)
    gc.collect()
    assert len(gone) == len(MODES) and not any(reference() for reference in gone)


def test_compiled_again(run_ranks):
    run_ranks(2, compiled_again)


def as_keras_chooses():
    """An unchanged script that only wraps its optimizer; ranks start from different weights and get rank 0's."""
    hvd.init()
    model = make_model(seed=hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    model.fit(*data_of(hvd.rank(), rows=23), batch_size=BATCH, epochs=2, verbose=0,
              callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert_same_everywhere(model)
    results = [flat(alone(keras.optimizers.Adam(0.01)))]
    for mode, steps_per_execution in (*((mode, 1) for mode in MODES), ("graph", 2)):
        model = make_model()
        opt = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        model.compile(opt, "mse", steps_per_execution=steps_per_execution, **MODES[mode])
        model.fit(*data_of(hvd.rank()), batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
        assert_same_everywhere(model)
        results.append(flat(model))
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-4, atol=1e-6)


@pytest.mark.timeout(260)
def test_as_keras_chooses(run_ranks):
    run_ranks(2, as_keras_chooses, timeout=240)
