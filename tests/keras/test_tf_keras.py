"""Models of tf_keras (Keras 2), which older Horovod scripts use (TF_USE_LEGACY_KERAS=1)."""
import importlib

import numpy as np
import pytest
import tensorflow as tf

import bagua_hvd.tensorflow.keras as hvd
from bagua_hvd._keras import legacy
from bagua_hvd.tensorflow import allgather_object, sync_batch_norm
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
    """A model trained by plain tf_keras on the data of all ranks."""
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
    # Two passes per step, averaged; local aggregates are not summed over ranks.
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


def aggregates(kind):
    """Gradients are reduced once, in Keras 2's aggregation over replicas, and not again in apply_gradients()."""
    hvd.init()
    rank, mean = hvd.rank(), (hvd.size() - 1) / 2
    make = {"new": tf_keras.optimizers.SGD, "legacy": tf_keras.optimizers.legacy.SGD}[kind]

    def aggregate(optimizer, pairs):
        return (optimizer._aggregate_gradients if kind == "legacy" else optimizer.aggregate_gradients)(pairs)

    def in_mode(mode):
        weight = tf.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(make(1.0))
        optimizer.apply_gradients([])           # Keras 2 allows this

        @mode
        def clipped(gradient):
            [(reduced, _)] = aggregate(optimizer, [(gradient, weight)])
            optimizer.apply_gradients([(tf.minimum(reduced, 0.25) + rank, weight)])     # not reduced again
            return reduced

        @mode
        def plain(gradient):
            optimizer.apply_gradients([(gradient, weight)])

        @mode
        def minimize():
            optimizer.minimize(lambda: weight * float(rank), [weight])

        for _ in range(2):
            weight.assign(0.0)
            assert clipped(tf.constant(float(rank))) == mean
            assert weight == -0.25 - rank
            weight.assign(0.0)
            plain(tf.constant(float(rank)))
            assert weight == -mean
            minimize()
            assert weight == -2 * mean

    in_mode(lambda function: function)
    in_mode(tf.function)
    # Gradients that the script has reduced itself are applied unchanged.
    told = {"new": {"skip_gradients_aggregation": True}, "legacy": {"experimental_aggregate_gradients": False}}[kind]
    for passes in (1, 2):
        weight = tf.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(make(1.0), backward_passes_per_step=passes)
        optimizer.apply_gradients([(tf.constant(float(rank)), weight)], **told)
        assert weight == -rank
    if kind == "new":       # what was set by a method, and is not in the configuration
        optimizer = tf_keras.optimizers.AdamW(0.1, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["spared"])
        optimizer = hvd.DistributedOptimizer(optimizer)
        spared, decayed = tf.Variable(1.0, name="spared"), tf.Variable(1.0, name="decayed")
        optimizer.apply_gradients([(tf.constant(0.0), variable) for variable in (spared, decayed)])
        assert spared == 1 and decayed < 1
    if kind == "legacy":        # new optimizers know the variables of one model only
        optimizer, weight, other = hvd.DistributedOptimizer(make(1.0)), tf.Variable(0.0), tf.Variable(0.0)
        aggregate(optimizer, [(tf.constant(1.0), weight)])
        optimizer.apply_gradients([(tf.constant(float(rank)), other)])
        assert other == -mean
    # Two passes per step, aggregated here and applied in a function that is traced once.
    optimizer = hvd.DistributedOptimizer(make(1.0), backward_passes_per_step=2)
    weight = tf.Variable(0.0)
    apply = tf.function(lambda gradient: optimizer.apply_gradients([(gradient, weight)]))
    for number in range(1, 5):
        [(reduced, _)] = aggregate(optimizer, [(tf.constant(float(rank)), weight)])
        apply(reduced)
        assert weight == -2 * mean * (number // 2) and optimizer.iterations == number
    # A window's gradients are those of all its passes.
    for mode in (lambda function: function, tf.function):
        optimizer = hvd.DistributedOptimizer(make(1.0), backward_passes_per_step=2)
        weight, other = tf.Variable(0.0), tf.Variable(0.0)
        legacy.build(optimizer, [weight, other])
        step = mode(lambda of_weight, of_other, optimizer=optimizer, weight=weight, other=other:
                    optimizer.apply_gradients([(of_weight, weight), (of_other, other)]))
        for number in (1, 2):
            step(tf.constant(float(rank)), None)
            step(None, tf.constant(2.0 * rank))
            assert (weight, other) == (-mean * number, -2 * mean * number)
    # Lists of variables may differ in a window, but not in graphs.
    weight, other = tf.Variable(0.0, name="weight"), tf.Variable(0.0, name="other")
    optimizer = hvd.DistributedOptimizer(make(1.0), backward_passes_per_step=2)
    legacy.build(optimizer, [weight, other])
    for number in (1, 2):
        optimizer.apply_gradients([(tf.constant(float(rank)), weight)])
        optimizer.apply_gradients([(tf.constant(2.0 * rank), other)])
        assert (weight, other) == (-mean * number, -2 * mean * number)
    optimizer.apply_gradients([(tf.constant(float(rank)), weight)])
    with pytest.raises(ValueError, match="weight:0 has a gradient from an earlier pass"):
        tf.function(lambda: optimizer.apply_gradients([(tf.constant(1.0), other)]))()
    # Algorithms that read the weights around the step cannot aggregate separately.
    optimizer = hvd.DistributedOptimizer(make(1.0), algorithm="decentralized")
    with pytest.raises(ValueError, match="Decentralized reads the weights around the optimizer's step"):
        aggregate(optimizer, [(tf.constant(1.0), weight)])
    optimizer.minimize(lambda: weight * 1.0, [weight])
    if kind == "legacy":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            weight = tf.compat.v1.get_variable("w", initializer=0.0)
            optimizer = hvd.DistributedOptimizer(make(1.0))
            reduced = optimizer.get_gradients(weight * float(rank), [weight])
            step = optimizer.apply_gradients(zip(reduced, [weight], strict=True))
            session.run(tf.compat.v1.global_variables_initializer())
            assert session.run([reduced, step])[0] == [mean]
            assert session.run(weight) == -mean


class Weighted(tf_keras.Sequential):
    def train_step(self, data):
        self.optimizer.set_weight(tf.shape(data[0])[0])
        return super().train_step(data)


def weighted(kind):
    """Batches of 4, 1 and 7 rows train as one process on all of them; also if each is given twice, in two passes."""
    hvd.init()
    batches, steps = (4, 1, 7), 3
    parts = [data_of(rank, rows * steps) for rank, rows in enumerate(batches)]
    single = make_model()
    single.compile(OPTIMIZERS[kind](), "mse")
    for step in range(steps):
        single.train_on_batch(*(np.concatenate([part[which][step * rows:][:rows] for part, rows in
                                                zip(parts, batches, strict=True)]) for which in (0, 1)))
    rows = batches[hvd.rank()]
    for passes in (1, 2):
        model = Weighted(make_model().layers)
        model.compile(hvd.DistributedOptimizer(OPTIMIZERS[kind](), backward_passes_per_step=passes,
                                               average_aggregated_gradients=True), "mse")
        for step in range(steps):
            for _ in range(passes):
                model.train_on_batch(*(array[step * rows:][:rows] for array in parts[hvd.rank()]))
        assert_near(model, single)
    # A number that a graph would keep is refused, and a weight holds for one step.
    weight, optimizer = tf.Variable(0.0), hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0))
    legacy.build(optimizer, [weight])

    def apply():
        optimizer.apply_gradients([(tf.constant(float(hvd.rank())), weight)])

    optimizer.set_weight(1)
    with pytest.raises(ValueError, match=r"call it in train_step\(\)"):
        tf.function(apply)()
    optimizer.set_weight(hvd.rank())
    apply()
    np.testing.assert_allclose(weight, -5 / 3, rtol=1e-6)
    apply()
    np.testing.assert_allclose(weight, -5 / 3 - 1, rtol=1e-6)


def loss_scaling(kind):
    """A LossScaleOptimizer around it skips the step on all ranks if one rank has an infinity."""
    hvd.init()
    rank = hvd.rank()
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
        hvd.DistributedOptimizer(OPTIMIZERS[kind]()), dynamic=True, initial_scale=8.0)
    weight = tf.Variable(1.0)
    scales = []
    for number in range(3):
        factor = float("inf") if number == 1 and rank == 1 else float(rank)
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(weight * factor)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))
        optimizer.apply_gradients(zip(gradients, [weight], strict=True))
        scales.append(float(optimizer.loss_scale))
    assert scales == [8.0, 4.0, 4.0]
    mean = (hvd.size() - 1) / 2
    np.testing.assert_allclose(weight, 1.0 - 0.1 * mean * (1 + 1.9), rtol=1e-6)       # two steps with momentum 0.9
    assert optimizer.iterations == 3
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    model = make_model()
    fit(model, hvd.DistributedOptimizer(OPTIMIZERS[kind]()))
    assert isinstance(model.optimizer, tf_keras.mixed_precision.LossScaleOptimizer)
    assert_same_everywhere(model)


def loss_scaling_of_windows(kind):
    """An infinity on one rank, in any pass of a window, skips the window's step on all ranks."""
    hvd.init()
    rank = hvd.rank()
    for bad in (0, 1):          # the pass of the second window in which rank 1 has an infinity
        optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
            hvd.DistributedOptimizer(OPTIMIZERS[kind](), backward_passes_per_step=2), dynamic=True, initial_scale=8.0)
        weight = tf.Variable(1.0)
        values = []
        for number in range(6):
            factor = float("inf") if number == 2 + bad and rank == 1 else float(rank)
            with tf.GradientTape() as tape:
                loss = optimizer.get_scaled_loss(weight * factor)
            gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))
            optimizer.apply_gradients(zip(gradients, [weight], strict=True))
            values.append([float(weight), float(optimizer.loss_scale), int(optimizer.iterations)])
        mean = hvd.size() - 1                   # of sums over two passes
        one, two = 1.0 - 0.1 * mean, 1.0 - 0.1 * mean * (1 + 1.9)      # momentum 0.9
        np.testing.assert_allclose([value for value, _, _ in values], [1.0, one, one, one, one, two], rtol=1e-6)
        assert [scale for _, scale, _ in values] == [8.0] * 3 + [4.0] * 3, values
        assert len({str(each) for each in allgather_object(values)}) == 1, values
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    model = make_model()
    fit(model, hvd.DistributedOptimizer(OPTIMIZERS[kind](), backward_passes_per_step=2))
    assert_same_everywhere(model)


def callbacks(kind):
    model = make_model(seed=hvd.rank())
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind]())
    history = fit(model, optimizer, hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                  hvd.callbacks.MetricAverageCallback(),
                  hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2), epochs=3).history
    assert_same_everywhere(model)
    losses = np.asarray(hvd.allgather(np.array([history["loss"]])))
    assert (losses[0] == losses[1]).all()
    # From 0.2 / 2 in steps of a quarter per epoch; 0.2 is reached at the end of the second epoch.
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
    for each in (model, loaded):        # both continue identically, with reductions
        each.fit(*data_of(hvd.rank()), batch_size=BATCH, epochs=1, verbose=0, shuffle=False)
        assert_same_everywhere(each)
    assert_near(loaded, model, rtol=1e-6, atol=1e-7)


def every_format_is_loaded(folder):
    """The optimizer's state is loaded where plain tf_keras loads it; the loaded model trains."""
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
    """SyncBatchNormalization against one BatchNormalization over the batches of all ranks."""
    # Its base class was chosen before this rank's environment was set.
    layer_of = importlib.reload(sync_batch_norm).SyncBatchNormalization
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    begin, end = 4 * rank * (rank + 1) // 2, 4 * (rank + 1) * (rank + 2) // 2       # rank r has 4 (r + 1) samples
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

    assert type(tf_keras.layers.deserialize(tf_keras.layers.serialize(layer_of()))) is layer_of
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


def window_that_a_change_of_ranks_ends(kind):
    """A rank that joins begins a window, so the others drop what they have of theirs."""
    model = make_model()
    model.compile(hvd.DistributedOptimizer(OPTIMIZERS[kind](), backward_passes_per_step=2), "mse")
    state = hvd.elastic.KerasState(model)
    data = data_of(hvd.rank())
    model.train_on_batch(*data)
    state.sync()
    before = model.get_weights()
    for same in (True, False):
        model.train_on_batch(*data)
        assert all((ours == theirs).all() for ours, theirs in zip(model.get_weights(), before, strict=True)) == same


def in_graphs(without):
    """The same in graphs of TensorFlow 1, where variables have values in a session only."""
    getattr(tf.compat.v1, without)()
    hvd.init()
    for part in (callbacks, elastic_state):
        part("legacy")
    model = make_model(seed=hvd.rank())
    before = model.get_weights()
    with hvd.consensus(model):
        for mine, mean in zip(before, model.get_weights(), strict=True):
            np.testing.assert_allclose(mean, hvd.allreduce(mine), rtol=1e-6)
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert float(hvd.allreduce(tf.constant(1.0 + hvd.rank()), average=False)) == 3.0


def everything(kind):
    hvd.init()
    for part in (trains, callbacks, elastic_state, window_that_a_change_of_ranks_ends):
        part(kind)


@pytest.mark.parametrize("kind", ["new", pytest.param("legacy", marks=pytest.mark.long)])
def test_trains_with_callbacks_and_a_state(run_ranks, kind):
    run_ranks(2, everything, arguments={"kind": kind})


@pytest.mark.parametrize("without", ["disable_eager_execution", "disable_v2_behavior"])
def test_in_graphs_of_tensorflow_1(run_ranks, without):
    run_ranks(2, in_graphs, arguments={"without": without})


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_are_reduced_where_keras_aggregates_them(run_ranks, kind):
    run_ranks(2, aggregates, arguments={"kind": kind})


@pytest.mark.timeout(260)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weighted(run_ranks, kind):
    run_ranks(3, weighted, arguments={"kind": kind}, timeout=240)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_loss_scaling(run_ranks, kind):
    run_ranks(2, loss_scaling, arguments={"kind": kind})


@pytest.mark.parametrize("kind", ["new", pytest.param("legacy", marks=pytest.mark.long)])
def test_loss_scaling_of_windows(run_ranks, kind):
    run_ranks(2, loss_scaling_of_windows, arguments={"kind": kind})


def test_saved_and_loaded(run_ranks, tmp_path):
    run_ranks(2, saved_and_loaded, arguments={"folder": str(tmp_path)}, env={"TF_USE_LEGACY_KERAS": "1"})


@pytest.mark.long
def test_every_format_is_loaded(run_ranks, tmp_path):
    run_ranks(2, every_format_is_loaded, arguments={"folder": str(tmp_path)}, env={"TF_USE_LEGACY_KERAS": "1"})


@pytest.mark.long
def test_sync_batch_normalization(run_ranks):
    run_ranks(2, synchronized_statistics, env={"TF_USE_LEGACY_KERAS": "1"})
