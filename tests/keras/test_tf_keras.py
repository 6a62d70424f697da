"""Models of tf_keras, the Keras 2 that scripts of Horovod's time run on (TF_USE_LEGACY_KERAS=1)."""
import importlib

import numpy as np
import pytest
import tensorflow as tf

import bagua_hvd.tensorflow.keras as hvd
from bagua_hvd._keras import legacy
from bagua_hvd.tensorflow import sync_batch_norm
from keras_training import assert_near, assert_same_everywhere, data_of, data_of_all

tf_keras = pytest.importorskip("tf_keras")

BATCH = 5
OPTIMIZERS = {
    "new": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9),
    "legacy": lambda: tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9),
}


def make_model(seed=0):
    tf_keras.utils.set_random_seed(seed)
    return tf_keras.Sequential([
        tf_keras.layers.Dense(8, "tanh", input_shape=(6,)), tf_keras.layers.Dense(3)
    ])


def fit(model, optimizer, *callbacks, epochs=2):
    model.compile(optimizer, "mse")
    return model.fit(*data_of(hvd.rank()), batch_size=BATCH, epochs=epochs, verbose=0, shuffle=False,
                     callbacks=list(callbacks))


def alone(optimizer, epochs=2):
    """A model trained by plain tf_keras on everybody's data."""
    model = make_model()
    model.compile(optimizer, "mse")
    model.fit(*data_of_all(hvd.size(), BATCH), batch_size=BATCH * hvd.size(), epochs=epochs, verbose=0, shuffle=False)
    return model


def trains(kind):
    make = OPTIMIZERS[kind]
    model = make_model(seed=hvd.rank())
    before = make_model()
    model.set_weights(before.get_weights())
    optimizer = hvd.DistributedOptimizer(make())
    assert isinstance(optimizer, type(make())) and type(optimizer).__name__ == "SGD"
    fit(model, optimizer)
    assert_same_everywhere(model)
    assert_near(model, alone(make()))
    # Two passes for each step, their mean; what one rank alone has is not summed.
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make(), backward_passes_per_step=2, average_aggregated_gradients=True)
    fit(model, optimizer)
    assert_same_everywhere(model)
    model = make_model()
    fit(model, hvd.DistributedOptimizer(make(), algorithm="bytegrad"))
    assert_same_everywhere(model)
    assert_near(model, alone(make()), "bytegrad")
    with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
        hvd.DistributedOptimizer(optimizer)


def callbacks(kind):
    model = make_model(seed=hvd.rank())
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind]())
    history = fit(model, optimizer, hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                  hvd.callbacks.MetricAverageCallback(),
                  hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2), epochs=3).history
    assert_same_everywhere(model)
    losses = np.asarray(hvd.allgather(np.array([history["loss"]])))
    assert (losses[0] == losses[1]).all()
    # From 0.2 / 2, by a quarter of an epoch each; reached at the end of the second epoch.
    np.testing.assert_allclose(history["lr"], [0.15, 0.2, 0.2], rtol=1e-6)


def saved_and_loaded(folder):
    hvd.init()
    path = f"{folder}/model.{hvd.rank()}.keras"
    model = make_model()
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    best.filepath = path
    fit(model, hvd.DistributedOptimizer(OPTIMIZERS["new"]()), best)
    loaded = hvd.load_model(path)
    assert_near(loaded, model, rtol=0, atol=0)
    assert [value.tolist() for value in map(np.asarray, loaded.optimizer.variables)] == \
           [value.tolist() for value in map(np.asarray, model.optimizer.variables)]
    for each in (model, loaded):        # both go on alike, and reduce
        each.fit(*data_of(hvd.rank()), batch_size=BATCH, epochs=1, verbose=0, shuffle=False)
        assert_same_everywhere(each)
    assert_near(loaded, model, rtol=1e-6, atol=1e-7)


def every_format_is_loaded(folder):
    """With the state of the optimizer where plain tf_keras finds it; and what was loaded trains."""
    hvd.init()
    for kind, make in OPTIMIZERS.items():
        model = make_model()
        fit(model, hvd.DistributedOptimizer(make()), epochs=1)
        for suffix in (".keras", ".h5", ""):
            path = f"{folder}/{kind}.{hvd.rank()}{suffix}"
            model.save(path)
            plain, loaded = tf_keras.models.load_model(path), hvd.load_model(path)
            assert_near(loaded, model, rtol=0, atol=0)
            assert isinstance(loaded.optimizer, type(make())) and hasattr(loaded.optimizer, "distribution")
            legacy.build(plain.optimizer, plain.trainable_variables)
            for ours, theirs in zip(legacy.variables(loaded.optimizer), legacy.variables(plain.optimizer), strict=True):
                np.testing.assert_array_equal(ours, theirs)
            loaded.fit(*data_of(hvd.rank()), batch_size=BATCH, epochs=1, verbose=0, shuffle=False)
            assert_same_everywhere(loaded)


def synchronized_statistics():
    """SyncBatchNormalization against one BatchNormalization over everybody's batch."""
    # Its base was chosen before this rank had its environment.
    layer_of = importlib.reload(sync_batch_norm).SyncBatchNormalization
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    begin, end = 4 * rank * (rank + 1) // 2, 4 * (rank + 1) * (rank + 2) // 2       # of rank r, 4 (r + 1) samples
    total = 4 * size * (size + 1) // 2

    def run(layer, x, weights, mask, make):
        @make
        def step(x, weights):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True, mask=mask)
                loss = tf.reduce_sum(y * weights)
            return y, tape.gradient(loss, [x, layer.gamma, layer.beta])

        layer.build(x.shape)
        return step(tf.constant(x), tf.constant(weights))

    random = np.random.default_rng(0)
    for shape, axis, masked in (((3,), -1, False), ((5, 3), 2, True), ((4, 4, 3), -1, False), ((4, 3), [1, 2], False)):
        x, weights = (random.normal(3.0, 2.0, (total, *shape)).astype("float32") for _ in range(2))
        mask = tf.reshape(tf.range(total * 5), (total, 5)) % 3 > 0 if masked else None
        mine = None if mask is None else mask[begin:end]
        plain = tf_keras.layers.BatchNormalization(axis=axis, fused=False)
        expected, (expected_dx, *expected_sums) = run(plain, x, weights, mask, lambda f: f)
        for make in (lambda f: f, tf.function, lambda f: tf.function(f, jit_compile=True)):
            layer = layer_of(axis=axis)
            y, (dx, *sums) = run(layer, x[begin:end], weights[begin:end], mine, make)
            np.testing.assert_allclose(y, expected[begin:end], atol=1e-5)
            np.testing.assert_allclose(dx, expected_dx[begin:end], atol=1e-4)
            for ours, theirs in zip(sums, expected_sums, strict=True):
                np.testing.assert_allclose(hvd.allreduce(ours, average=False), theirs, rtol=1e-4, atol=1e-3)
            np.testing.assert_allclose(layer.moving_mean, plain.moving_mean, rtol=1e-5)
            np.testing.assert_allclose(layer.moving_variance, plain.moving_variance, rtol=1e-5)
    for wrong in ({"fused": True}, {"fused": None}, {"virtual_batch_size": 2}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            layer_of(**wrong)

    tf_keras.utils.set_random_seed(0)
    model = tf_keras.Sequential([tf_keras.layers.Dense(8, input_shape=(6,)), layer_of(), tf_keras.layers.Dense(3)])
    assert model.layers[1].name.startswith("sync_batch_normalization")
    fit(model, hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.1)))
    assert_same_everywhere(model)


def elastic_state(kind):
    model = make_model()
    model.compile(hvd.DistributedOptimizer(OPTIMIZERS[kind]()), "mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    state.sync()
    data = data_of(hvd.rank())
    keep = [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state)]
    model.fit(*data, batch_size=BATCH, epochs=1, verbose=0, shuffle=False, callbacks=keep)
    assert (state.batch, state.epoch) == (0, 1)
    state.save()
    committed = model.get_weights()
    model.fit(*data, batch_size=BATCH, epochs=1, verbose=0, shuffle=False, callbacks=keep)
    trained = model.get_weights()
    state.restore()
    assert state.epoch == 1
    for ours, theirs in zip(model.get_weights(), committed, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model.fit(*data, batch_size=BATCH, epochs=1, verbose=0, shuffle=False)      # momenta were restored, too
    for ours, theirs in zip(model.get_weights(), trained, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def everything(kind):
    hvd.init()
    for part in (trains, callbacks, elastic_state):
        part(kind)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_trains_with_callbacks_and_a_state(run_ranks, kind):
    run_ranks(2, everything, arguments={"kind": kind})


def test_saved_and_loaded(run_ranks, tmp_path):
    run_ranks(2, saved_and_loaded, arguments={"folder": str(tmp_path)}, env={"TF_USE_LEGACY_KERAS": "1"})


def test_every_format_is_loaded(run_ranks, tmp_path):
    run_ranks(2, every_format_is_loaded, arguments={"folder": str(tmp_path)}, env={"TF_USE_LEGACY_KERAS": "1"})


def test_sync_batch_normalization(run_ranks):
    run_ranks(2, synchronized_statistics, env={"TF_USE_LEGACY_KERAS": "1"})
