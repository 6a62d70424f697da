"""Callbacks, saving and loading, and the state of elastic jobs, on two ranks."""
import os
import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import bagua_hvd.keras as hvd_keras
import bagua_hvd.tensorflow
import bagua_hvd.tensorflow.keras as hvd
from bagua_hvd._keras import legacy, values
from bagua_hvd._keras.values import broadcast_variables
from bagua_hvd.collectives import rules
from bagua_hvd.job.runtime import runtime
from keras_training import assert_same_everywhere, data_of, flat, make_model

STEPS = 4
ALONE = hvd.ProcessSet([0])


def fit(model, callbacks, epochs=1, **options):
    return model.fit(*data_of(hvd.rank()), batch_size=5, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks,
                     **options)


class Recorder(keras.callbacks.Callback):
    """Records the learning rate and the momenta at the beginning of each step."""

    def __init__(self):
        super().__init__()
        self.rates, self.velocities = [], []

    def on_train_batch_begin(self, batch, logs=None):
        velocities = getattr(self.model.optimizer, "momentums", None)       # exist after the first step
        self.rates.append(float(self.model.optimizer.learning_rate))
        self.velocities.append(float(velocities[0].numpy().flat[0]) if velocities else 0.0)


def broadcast_and_metrics():
    rank, size = hvd.rank(), hvd.size()
    # Different weights and optimizer states; one variable is excluded.
    model = make_model(seed=rank)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0, momentum=0.9)), "mse", metrics=["mae"])
    kept = model.layers[1].bias
    kept.assign([rank, rank, rank])
    model.optimizer.learning_rate = 0.0
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=[kept])
    history = fit(model, [callback])
    expected = make_model(seed=1).get_weights()
    for weight, value in zip(model.weights, expected, strict=True):
        if weight is not kept:
            np.testing.assert_array_equal(weight.numpy(), value)
    assert (kept.numpy() == rank).all()
    assert callback.broadcast_done
    # Once, but again after init(): a rank that joins an elastic job has made a new one.
    fit(model, [callback])
    model.layers[0].bias.assign([float(rank)] * 8)
    fit(model, [callback])
    assert (model.layers[0].bias.numpy() == rank).all()
    runtime.inits += 1
    fit(model, [callback])
    assert (model.layers[0].bias.numpy() == 1).all()
    with pytest.raises(ValueError, match="variables"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["dense"])

    # Also in a custom loop: the broadcast replaces DiLoCo's outer weights.
    weight = keras.Variable(float(rank))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0), algorithm=hvd.algorithms.DiLoCo(2, full_steps=0))
    for step in range(4):
        optimizer.apply([tf.constant(1.0)], [weight])
        if step == 0:
            bagua_hvd.tensorflow.broadcast_variables([weight], 1)
        assert float(weight) == 1.0

    # Metrics are averaged over the ranks before later callbacks see them.
    seen = {}
    local = {}

    class Before(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            local.update(logs)
            logs["confusion"] = np.eye(2)

    class After(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            assert (logs.pop("confusion") == np.eye(2)).all()      # not a number, so unchanged
            seen.update(logs)

    history = fit(model, [Before(), hvd.callbacks.MetricAverageCallback(), After()])
    assert set(seen) == {"loss", "mae"}
    for name, value in local.items():
        everyone = hvd.allgather(np.array([value]))
        assert everyone[0] != everyone[1]
        np.testing.assert_allclose(seen[name], everyone.mean(), rtol=1e-6)
        assert history.history[name] == [seen[name]]
    assert size == 2


def plain_values():
    """Results are usable as NumPy arrays and as eager tensors, because scripts treat them as both."""
    rank = hvd.rank()
    for functions in (hvd, hvd_keras):
        with warnings.catch_warnings():
            warnings.simplefilter("error")          # no deprecation warning for defaults
            mean = functions.allreduce(float(rank))
        with pytest.raises(ValueError, match="compression='fp16'"):
            functions.allreduce(1.0, compression="fp16")
        assert f"{mean:.2f}" == "0.50" and mean == float(mean) == mean.numpy() == tf.constant(mean).numpy() == 0.5
        assert type(mean.numpy()) is np.float64 and functions.broadcast(rank, 1).numpy() == 1
        gathered = functions.allgather([rank])
        assert gathered.tolist() == [0, 1] and type(gathered.numpy()) is np.ndarray and gathered.max() == 1
        assert functions.reducescatter(np.ones((2, 3)), op=hvd.Sum).numpy().tolist() == [[2.0] * 3]
        for dtype in (">f4", ">i8", ">f2"):     # NumPy arrays in the other byte order
            numbers = np.arange(6).reshape(2, 3).astype(dtype)
            assert functions.allreduce(numbers, op=hvd.Sum).tolist() == (2 * numbers).tolist()
            assert functions.allgather(numbers).tolist() == 2 * numbers.tolist()
            assert functions.broadcast(numbers * rank, 1).tolist() == numbers.tolist()
            assert functions.reducescatter(numbers, op=hvd.Sum).tolist() == [(2 * numbers[rank]).tolist()]
        for dtype in ("uint32", "uint64", "complex64", "float8_e4m3fn"):       # unknown to the core
            for shape in ((), (2, 3)):
                numbers = tf.cast(tf.fill(shape, 2.0 + rank), dtype).numpy()
                received = functions.broadcast(numbers, 1)
                assert received.dtype == numbers.dtype and (received == tf.cast(3.0, dtype).numpy()).all()
    variable = keras.Variable(tf.cast([rank, 5], tf.uint32), dtype="uint32")
    broadcast_variables([variable], 1, "uint32")
    assert variable.numpy().tolist() == [1, 5]


def learning_rates():
    size = hvd.size()

    def run(*callbacks, epochs, momentum=0.9, initial=0.3):
        model = make_model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(initial, momentum=momentum)), "mse")
        recorder = Recorder()
        history = fit(model, [*callbacks, recorder], epochs)
        return recorder, history, model

    # Warm-up: 1/n (e (n - 1) / w + 1), e = epoch + (batch + 1) / steps; full at the last batch of epoch w - 1.
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1)
    recorder, history, _ = run(warmup, epochs=3)
    expected = [0.4 / size * ((step + 1) / STEPS * (size - 1) / 2 + 1) for step in range(2 * STEPS)]
    np.testing.assert_allclose(recorder.rates, expected + [0.4] * STEPS, rtol=1e-6)
    np.testing.assert_allclose(history.history["lr"], [expected[STEPS - 1], 0.4, 0.4], rtol=1e-6)

    # The rate is reached even if Keras calls callbacks after every second batch only.
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.3)), "mse", steps_per_execution=2)
    history = fit(model, [hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)], epochs=3)
    np.testing.assert_allclose(history.history["lr"], [expected[2], 0.4, 0.4], rtol=1e-6)

    # Another fit() may have another number of steps.
    model = make_model()
    model.compile(keras.optimizers.SGD(), "mse")
    for number in (2, 4):
        model.fit(*data_of(hvd.rank()), batch_size=5, steps_per_epoch=number, verbose=0, callbacks=[warmup])
        assert warmup.steps_per_epoch == number

    # A staircase schedule, a constant as a power, with a beginning and an end; and a continuous schedule.
    def schedule(*arguments, **options):
        return hvd.callbacks.LearningRateScheduleCallback(0.1, *arguments, **options)

    recorder, _, _ = run(schedule(lambda epoch: 10 + epoch), epochs=2, momentum=0.0)
    np.testing.assert_allclose(recorder.rates, [1.0] * STEPS + [1.1] * STEPS, rtol=1e-6)
    recorder, _, _ = run(schedule(0.5, start_epoch=1, end_epoch=2), epochs=3, momentum=0.0)
    np.testing.assert_allclose(recorder.rates, [0.3] * STEPS + [0.1] * 2 * STEPS, rtol=1e-6)
    recorder, _, _ = run(schedule(lambda epoch: epoch, staircase=False), epochs=1, momentum=0.0)
    np.testing.assert_allclose(recorder.rates, [0.1 * batch / STEPS for batch in range(STEPS)], rtol=1e-6)
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, 0.5)

    # Momentum correction scales the velocity once by the factor of the rate.
    plain, _, _ = run(schedule(lambda epoch: 1.0, momentum_correction=False), epochs=2, initial=0.1)
    jump = schedule(lambda epoch: 1.0 if epoch == 0 else 3.0)
    corrected, _, _ = run(jump, epochs=2, initial=0.1)
    np.testing.assert_allclose(corrected.velocities[:STEPS], plain.velocities[:STEPS], rtol=1e-5)
    np.testing.assert_allclose(corrected.velocities[STEPS], 3.0 * plain.velocities[STEPS], rtol=1e-4)

    # Only for optimizers whose velocity is a step: Muon's is a sum of gradients.
    for optimizer in (keras.optimizers.RMSprop(0.1, momentum=0.9), keras.optimizers.Muon(0.1)):
        model = make_model()
        model.compile(hvd.DistributedOptimizer(optimizer), "mse")
        model.optimizer.build(model.trainable_variables)    # a step by Muon fails in TensorFlow before Keras 3.13
        jump.set_model(model)
        state = legacy.variables(model.optimizer)[2:]       # after iterations and learning rate
        for variable in state:
            variable.assign(np.ones(variable.shape))
        jump._adjust(1)
        changed = [(values.to_array(variable) != 1).any() for variable in state]
        corrects = isinstance(optimizer, keras.optimizers.RMSprop)
        assert sum(changed) == corrects * len(model.trainable_variables)


def unequal_steps():
    """Callbacks that count epochs need equal epochs on all ranks, and raise an error before the first step."""
    x, y = data_of(hvd.rank(), 20 + 5 * hvd.rank())

    def run(callback, **options):
        model = make_model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options), "mse")
        model.fit(x, y, batch_size=5, epochs=2, verbose=0, callbacks=[callback])
        return model

    for callback in (hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.1 ** epoch),
                     hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2),
                     hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, steps_per_epoch=4),
                     hvd.callbacks.MetricAverageCallback()):
        with pytest.raises(ValueError, match="4 steps on one rank and 5 on another"):
            run(callback)
    # Ranks that train independently may have different epochs.
    run(hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5), process_set=ALONE)


class Halving(keras.optimizers.SGD):
    """A custom optimizer."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * 0.5, variable, learning_rate)


def saving(folder):
    x, y = data_of(hvd.rank())

    def train(model):
        model.fit(x, y, batch_size=10, verbose=0, shuffle=False)

    for optimizer, options in ((keras.optimizers.Adam(0.01), {}), (Halving(0.1, momentum=0.9), {
        "custom_optimizers": [Halving],
    })):
        model = make_model()
        model.compile(hvd.DistributedOptimizer(optimizer), "mse")
        train(model)
        path = os.path.join(folder, f"{type(optimizer).__name__}{hvd.rank()}.keras")
        model.save(path)
        plain = keras.models.load_model(path, custom_objects={"Halving": Halving} if options else None)
        assert type(plain.optimizer) is type(optimizer)
        assert plain.optimizer.get_config() == model.optimizer.get_config()
        assert int(plain.optimizer.iterations) == 2
        saved = flat(model)
        wrapped = hvd.load_model(path, **options)
        assert type(wrapped.optimizer) is not type(optimizer) and isinstance(wrapped.optimizer, type(optimizer))
        np.testing.assert_array_equal(flat(wrapped), saved)
        train(model)
        train(wrapped)
        np.testing.assert_array_equal(flat(wrapped), flat(model))
        assert_same_everywhere(wrapped)
    # The class also makes distributed optimizers from configurations.
    again = type(model.optimizer).from_config(model.optimizer.get_config())
    model = make_model()
    model.compile(again, "mse")
    train(model)
    assert_same_everywhere(model)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(again)

    # Saves only the best model, to a path that the estimator sets.
    for package, options in ((hvd, {"save_weights_only": True}), (hvd_keras, {})):
        best = package.callbacks.BestModelCheckpoint(monitor="loss", **options)
        assert best.save_best_only and best.filepath is None
        with pytest.raises(ValueError, match="filepath"):
            fit(model, [best])
        best.filepath = os.path.join(folder, f"best{hvd.rank()}" + (".weights.h5" if options else ".keras"))
        fit(model, [best])
        assert os.path.exists(best.filepath)


def loudly():
    """Updates without a reduction raise an error."""
    class AroundApply(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars):
            for gradient, variable in grads_and_vars:
                self.update_step(gradient, variable, 0.1)

    model = make_model()
    model.compile(hvd.DistributedOptimizer(AroundApply(0.1)), "mse")
    with pytest.raises(RuntimeError, match="have not been reduced"):
        model.fit(*data_of(hvd.rank()), verbose=0)
    with pytest.raises(ValueError, match="Average and Sum"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), op=2)
    with pytest.raises(ValueError, match="Did you mean 'bytegrad'"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), algorithm="bytgrad")
    with pytest.raises(ValueError, match="cannot serve"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), algorithm="qadam")
    with pytest.raises(RuntimeError, match="eager"):
        hvd.broadcast_global_variables(0)


def elastic():
    model = make_model(seed=hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    with pytest.raises(ValueError, match="built"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    commits = []
    state.register_reset_callbacks([lambda: None])
    state.check_host_updates = lambda: commits.append((state.epoch, state.batch))
    state.sync()
    assert_same_everywhere(model)
    np.testing.assert_array_equal(flat(model), flat(make_model(seed=0)))

    def callbacks():
        return [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=3)]

    fit(model, callbacks(), epochs=2)
    assert (state.epoch, state.batch) == (2, 0)
    assert commits == [(0, 3), (1, 0), (1, 2), (2, 0)]
    # restore() undoes uncommitted changes of model, optimizer and attributes.
    committed = flat(model), int(model.optimizer.iterations), model.optimizer.momentums[0].numpy()
    fit(model, [])
    state.epoch = 7
    state.restore()
    np.testing.assert_array_equal(flat(model), committed[0])
    assert (int(model.optimizer.iterations), state.epoch) == (committed[1], 2)
    np.testing.assert_array_equal(model.optimizer.momentums[0].numpy(), committed[2])
    # A resumed epoch has only the remaining steps, with both ways of counting epochs.
    recorder = Recorder()
    state.batch = 3
    fit(model, [*callbacks(), recorder], epochs=2)
    assert len(recorder.rates) == 1 + STEPS and (state.epoch, state.batch) == (4, 0)
    fit(model, callbacks(), epochs=5, initial_epoch=4)
    assert state.epoch == 5
    # compile() may follow the state.
    model = make_model()
    state = hvd.elastic.KerasState(model)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    state.sync()
    fit(model, [])
    assert state.optimizer is model.optimizer
    state.restore()
    assert int(model.optimizer.iterations) == 0 and not model.optimizer.momentums[0].numpy().any()
    # Not later: a rank that joins may not have compiled its model yet, and would send fewer variables.
    model = make_model()
    state = hvd.elastic.KerasState(model)
    state.sync()
    model.compile("sgd", "mse")
    state.sync()
    assert state.optimizer is None
    assert_same_everywhere(model)


def run_cells(folder):
    hvd.init(process_sets=[ALONE])
    for cell in (broadcast_and_metrics, plain_values, learning_rates, unequal_steps, saving, loudly, elastic):
        print(cell.__name__, flush=True)
        cell(folder) if cell is saving else cell()


@pytest.mark.timeout(260)
def test_callbacks(run_ranks, tmp_path):
    results = run_ranks(2, run_cells, arguments={"folder": str(tmp_path)}, timeout=240)
    assert results[0].output.count("finished gradual learning rate warmup to 0.4") == 1
    assert "warmup" not in results[1].output


def test_commits_count_batches_and_not_executions():
    commits = []
    model = make_model()
    model.compile("sgd", "mse", steps_per_execution=4)
    x, y = data_of(0)
    data = tf.data.Dataset.from_tensors((x, y)).repeat(16)
    state = types.SimpleNamespace(commit=lambda: commits.append(None))
    model.fit(data, callbacks=[hvd.elastic.CommitStateCallback(state, batches_per_commit=8)], verbose=0)
    assert len(commits) == 2 + 1


def test_an_average_that_fails_is_no_entry_that_is_left_out(monkeypatch):
    def allreduce(frontend, value, in_place, name, *how, blocking):
        raise ValueError(f"{name} is in flight")

    monkeypatch.setattr(rules, "allreduce", allreduce)
    with pytest.raises(ValueError, match=r"MetricAverageCallback.loss is in flight"):
        hvd.callbacks.MetricAverageCallback().on_epoch_end(0, {"a list": [1, 2], "loss": 1.0})
