"""KerasState(every_step=True) on three real ranks, with failures at all points of a step, and its errors."""
import keras
import numpy as np
import pytest
import tensorflow as tf

import bagua_hvd.tensorflow as hvd_tensorflow
import bagua_hvd.tensorflow.keras as hvd
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job.elastic import HostUpdateResult, notification_manager
from bagua_hvd.reduction.window import Window

pytestmark = pytest.mark.timeout(600)
SECONDS = 500       # on a busy machine
RANKS, EPOCHS, STEPS, BATCH = 3, 2, 7, 2
DATA = np.random.default_rng(5).standard_normal((EPOCHS * STEPS * RANKS * BATCH, 4))


def make_model(seed=0):
    keras.utils.set_random_seed(7)
    layers = keras.layers
    return keras.Sequential([
        layers.Input((4,), dtype="float64"), layers.Dense(8, dtype="float64"),
        layers.BatchNormalization(dtype="float64"), layers.ReLU(dtype="float64"),
        layers.Dropout(0.5, seed=100 + seed, dtype="float64"),
        layers.Dense(1, dtype="float64")])


def make_plain():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def share(step, rank):
    return DATA[step * RANKS * BATCH + rank:(step + 1) * RANKS * BATCH:RANKS]


def loss_of(model, inputs):
    return tf.reduce_mean((model(inputs, training=True) - 1) ** 2)


def replayed():
    """The model of each rank after all steps, made by one process without failures."""
    models = [make_model(rank) for rank in range(RANKS)]
    optimizers = [make_plain() for _ in models]
    for step in range(EPOCHS * STEPS):
        gradients = []
        for rank, model in enumerate(models):
            with tf.GradientTape() as tape:
                loss = loss_of(model, share(step, rank))
            gradients.append(tape.gradient(loss, model.trainable_variables))
        mean = [sum(of_ranks) / RANKS for of_ranks in zip(*gradients, strict=True)]
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.apply(mean, model.trainable_variables)
    return models


class Faults(keras.callbacks.Callback):
    """Rank 2 fails before step 5 and rank 1 after step 7; hosts change in step 9."""

    def __init__(self, state, happened):
        super().__init__()
        self._state, self._happened = state, happened

    def _once(self, step):
        return self._state.epoch * STEPS + self._state.batch == step and step not in self._happened \
            and not self._happened.add(step)

    def on_train_batch_begin(self, batch, logs=None):
        if hvd.rank() == 2 and self._once(5):
            raise HorovodInternalError("simulated")
        if hvd.rank() == 0 and self._once(9):
            notification_manager.handle_hosts_updated(1, HostUpdateResult.added)

    def on_train_batch_end(self, batch, logs=None):
        if hvd.rank() == 1 and self._once(8):
            raise HorovodInternalError("simulated")


def by_hand(model, state, callback, compiled):
    """A custom loop equivalent to fit()."""
    def step(inputs):
        with tf.GradientTape() as tape:
            loss = loss_of(model, inputs)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step = tf.function(step) if compiled else step

    def train():
        while state.epoch < EPOCHS:
            while state.batch < STEPS:
                callback.on_train_batch_begin(state.batch)
                step(tf.constant(share(state.epoch * STEPS + state.batch, hvd.rank())))
                state.batch += 1
                callback.on_train_batch_end(state.batch)
            state.epoch, state.batch = state.epoch + 1, 0

    return train


def by_fit(model, state, callback):
    def batches():
        for step in range(state.epoch * STEPS + state.batch, EPOCHS * STEPS):
            yield share(step, hvd.rank()), np.ones((BATCH, 1))

    def train():
        data = tf.data.Dataset.from_generator(batches, output_signature=(
            tf.TensorSpec((BATCH, 4), tf.float64), tf.TensorSpec((BATCH, 1), tf.float64)))
        model.fit(data, epochs=EPOCHS, initial_epoch=state.epoch, steps_per_epoch=STEPS, verbose=0, callbacks=[
            hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state), callback])

    return train


def training(how):
    hvd.init()
    rank = hvd.rank()
    model = make_model(rank)
    if rank:
        model.layers[0].kernel.assign(np.zeros((4, 8)))     # sync() copies rank 0's state to all ranks
    model.compile(hvd.DistributedOptimizer(make_plain()), "mse", jit_compile=False)
    state = hvd.elastic.KerasState(model, every_step=True, batch=0, epoch=0)
    entered, happened, callback = [], set(), None
    wait = Window.wait

    def fails_after_wait(window):
        failure = wait(window)
        behind = rank == 1 and (state.epoch, state.batch) == (0, 3) and 3 not in happened
        if behind:
            happened.add(3)
        return HorovodInternalError("simulated") if behind else failure

    Window.wait = fails_after_wait
    callback = Faults(state, happened)
    train = by_fit(model, state, callback) if how == "fit" else by_hand(model, state, callback, how == "function")

    @hvd.elastic.run
    def train_from(state):
        entered.append(state.epoch * STEPS + state.batch)
        train()

    train_from(state)
    # The other ranks have completed the step that rank 1 did not finish, so it continues with the next one.
    assert entered == [0, 4, 5, 8, 9], entered
    counters = state.epoch, state.batch, int(model.optimizer.iterations)
    assert counters == (EPOCHS, 0, EPOCHS * STEPS), counters
    models = replayed()
    tolerance = 1e-5 if how == "fit" else 1e-10         # Keras computes its loss in float32
    for weight, expected in zip(model.trainable_weights, models[rank].trainable_weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), expected.numpy(), rtol=tolerance, atol=tolerance)
    # Running statistics differ between ranks until all get those of the first rank that is ahead, here rank 0.
    if rank == 0:
        for buffer, expected in zip(model.layers[1].non_trainable_weights, models[0].layers[1].non_trainable_weights,
                                    strict=True):
            np.testing.assert_allclose(buffer.numpy(), expected.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("how", ["fit", "function", pytest.param("eager", marks=pytest.mark.long)])
def test_three_ranks(run_ranks, how):
    run_ranks(RANKS, training, arguments={"how": how}, timeout=SECONDS)


# --------------------------------------------------------------------------------------------------------- errors ----


def make_distributed(**arguments):
    return hvd.DistributedOptimizer(make_plain(), **arguments)


def make_state(optimizer=None, **options):
    model = make_model()
    model.compile(optimizer or make_distributed(), "mse", **options)
    return hvd.elastic.KerasState(model, every_step=True, batch=0)


def torn():
    """A failure after the averages have arrived and before the step is counted."""
    hvd.init()
    state = make_state()
    model = state.model

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(model, tf.constant(DATA[:4]))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    def step_and_restore(counts):
        step()
        if not counts:      # simulates a failing graph, in which TensorFlow chooses the order of updates
            state._every_step._counted.assign_add(-1)
        if hvd.rank() == 0 and counts:
            state.model.layers[0].kernel.assign_add(np.ones((4, 8)))
        state.restore()

    state.sync()
    step_and_restore(True)
    state.sync()
    step_and_restore(hvd.rank() == 0)
    state.sync()            # rank 1 gets rank 0's state
    kernels = hvd_tensorflow.allgather_object(model.layers[0].kernel.numpy())
    np.testing.assert_array_equal(*kernels)
    step_and_restore(False)
    with pytest.raises(RuntimeError, match="another collective of the compiled step has failed"):
        state.sync()


def joins(changes):
    """Rank 2 is new; changes: the rank that changes its weights before."""
    hvd.init()
    rank = hvd.rank()
    state = make_state()
    state.sync()
    if rank == 2:
        state._every_step.completed = None
    kernel = state.model.layers[0].kernel
    if changes == rank:
        kernel.assign(np.nextafter(kernel.numpy(), 9))
    if changes == 1:
        with pytest.raises(RuntimeError, match="rank 1 after step 0: weights or optimizer state are not bit-equal"):
            state.sync()
    else:           # a new rank's weights need not be equal
        state.sync()


@pytest.mark.parametrize("changes", [1, 2])
def test_ranks_that_differ_are_named_when_one_joins(run_ranks, changes):
    run_ranks(RANKS, joins, arguments={"changes": changes}, timeout=SECONDS)


def test_a_step_that_has_applied_part_of_its_variables(run_ranks):
    run_ranks(2, torn, timeout=SECONDS)


def loss_scaled():
    hvd.init()
    state = make_state(hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(make_plain())), jit_compile=False)
    state.sync()
    state.model.fit(share(0, hvd.rank()), np.ones((BATCH, 1)), batch_size=BATCH, verbose=0)
    assert state._every_step.completed == 1 == int(state._every_step._counted)


def test_a_loss_scale_optimizer_that_is_distributed(run_ranks):
    run_ranks(2, loss_scaled, timeout=SECONDS)


def refusals():
    hvd.init()

    def refused(why, optimizer):
        with pytest.raises(ValueError, match=f"cannot keep every step: {why}.*leave out every_step and call commit"):
            make_state(optimizer)

    refused("the state holds no DistributedOptimizer", make_plain())
    refused("with LocalSGD ranks have different models", make_distributed(algorithm="local_sgd"))
    refused("with delay=1, losing a rank loses the gradients", make_distributed(delay=1))
    refused("with backward_passes_per_step > 1 a step begins before", make_distributed(backward_passes_per_step=2))
    with pytest.raises(ValueError, match="TensorFlowState.every_step=True. cannot keep every step: it sees variables"):
        hvd_tensorflow.elastic.TensorFlowState([tf.Variable(1.0)], every_step=True)
    with pytest.raises(ValueError, match="steps_per_execution=2 callbacks count several steps at once"):
        make_state(steps_per_execution=2).sync()
    with pytest.raises(ValueError, match="XLA, which changes weights even after a rank is lost: pass jit_compile"):
        make_state(jit_compile=True).model.fit(DATA[:4], np.ones((4, 1)), verbose=0)
    model = make_model()
    model.compile(make_distributed(), "mse", jit_compile=False)
    model.fit(DATA[:4], np.ones((4, 1)), verbose=0)
    with pytest.raises(ValueError, match="must be made before the first training step"):
        hvd.elastic.KerasState(model, every_step=True)
    state = hvd_tensorflow.elastic.TensorFlowKerasState(make_state().model, every_step=True, batch=0)
    state.sync()
    with pytest.warns(UserWarning, match="TensorFlowKerasState.*have nothing to do: delete these calls") as warned:
        state.commit()
        state.commit()
    assert len(warned) == 1 and state._saved_values is None


def test_what_it_refuses(run_ranks):
    run_ranks(2, refusals, timeout=SECONDS)
