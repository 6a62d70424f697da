"""Every algorithm in Keras' fit(), with different data on each rank: eager, in graphs, and compiled by XLA.

Algorithms on gradients and momenta keep the ranks' weights bit-identical; for the others hvd.consensus() makes them so.
"""
import keras
import numpy as np
import pytest
import tensorflow as tf

import bagua_hvd.tensorflow.keras as hvd
from bagua_hvd import algorithms
from keras_training import MODES as ALL_MODES
from keras_training import assert_near, assert_same_everywhere, data_of, data_of_all, flat, make_model

MODES = ("graph", "eager", "xla")
BATCH, EPOCHS, STEPS = 5, 3, 12

# Arguments other than algorithm=name with SGD; these algorithms may also need Adam.
ARGUMENTS = {
    "qadam": {"warmup_steps": 4}, "onebit_adam": {"warmup_steps": 6},
    "diloco": {"communication_interval": 4, "fragments": 3},
    "local_sgd": {"communication_interval": 4},
    **{name: {"sync_interval_ms": 0} for name in algorithms.names() if name.startswith("async")},
}
# One algorithm for each path through a step runs in all modes, because compiling takes long.
COMPILED = ("gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "async", "qadam")
ALL = {name: MODES if name in COMPILED else ("graph",) for name in algorithms.names()}
# Each of these paths, and each mode besides graphs for two of them.
SOME = {"gradient_allreduce": ("graph",), "bytegrad": ("graph", "xla"), "decentralized": ("graph", "eager"),
        "low_precision_decentralized": ("graph",), "async": ("graph", "eager"), "qadam": ("graph", "xla")}
assert set(SOME) == set(COMPILED)
ADAM = ("qadam", "onebit_adam")
EXACT = ("gradient_allreduce", "local_sgd", "decentralized")


def optimizer_for(name):
    return keras.optimizers.Adam(0.01) if name in ADAM else keras.optimizers.SGD(0.05)


def train(name, mode):
    """The model after EPOCHS epochs, with equal weights on all ranks."""
    algorithm = algorithms.get(name, **ARGUMENTS.get(name, {}))
    model = make_model()
    before = flat(model)
    model.compile(hvd.DistributedOptimizer(optimizer_for(name), algorithm=algorithm), "mse", **ALL_MODES[mode])
    sent = bytes_sent()
    losses = model.fit(*data_of(hvd.rank()), batch_size=BATCH, epochs=EPOCHS, verbose=0, shuffle=False).history["loss"]
    assert int(model.optimizer.iterations) == STEPS
    assert bytes_sent() > sent, "it has exchanged nothing"
    assert losses[-1] < losses[0]
    if algorithm.asynchronous:
        algorithm.abort()
    if algorithm.models_differ:
        hvd.consensus(model)
    assert_same_everywhere(model)
    assert not np.allclose(flat(model), before)
    return model


def bytes_sent():
    from bagua_hvd.job import basics

    return basics.context().counters().payload_bytes_sent


def train_in_modes(modes_of):
    hvd.init()
    for name, modes in modes_of.items():
        results = {}
        for mode in modes:
            print(name, mode, flush=True)
            results[mode] = train(name, mode)
        for mode in results:
            if not name.startswith("async"):            # their rounds depend on timing
                assert_near(results[mode], results["graph"], "gradient_allreduce" if name in EXACT else "")
        # Averaging gradients equals one process with the data of all ranks; averaging weights nearly does.
        if name in ("gradient_allreduce", "qadam", "decentralized"):
            alone = make_model()
            alone.compile(optimizer_for(name), "mse", jit_compile=False)
            alone.fit(*data_of_all(hvd.size(), BATCH), batch_size=BATCH * hvd.size(), epochs=EPOCHS, verbose=0,
                      shuffle=False)
            assert_near(results["graph"], alone, "gradient_allreduce" if name == "gradient_allreduce" else "")


@pytest.mark.timeout(260)
@pytest.mark.parametrize("modes_of", [SOME, pytest.param(ALL, marks=pytest.mark.long)], ids=["some", "all"])
def test_algorithms(run_ranks, modes_of):
    run_ranks(2, train_in_modes, arguments={"modes_of": modes_of}, timeout=240)


def rounds_of_async():
    """Rounds happen while graphs run, not only in abort(); one rank makes more steps than the other."""
    hvd.init()
    algorithm = algorithms.Async(sync_interval_ms=0)
    model = make_model(seed=hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0), algorithm=algorithm), "mse",
                  jit_compile=False)
    x, y = data_of(hvd.rank())
    everyone = hvd.allgather(flat(model)[None])
    apart = np.abs(everyone[0] - everyone[1]).max()
    model.fit(x, y, batch_size=BATCH, epochs=10 + 5 * hvd.rank(), verbose=0)
    mine = flat(model)
    algorithm.abort()
    # Without a learning rate the result is the mean of the initial weights; abort() only completes it.
    np.testing.assert_allclose(flat(model), everyone.mean(axis=0), rtol=1e-5, atol=1e-5)
    assert np.abs(mine - everyone.mean(axis=0)).max() < apart / 4
    algorithm.resume()


def test_rounds_of_async(run_ranks):
    run_ranks(2, rounds_of_async)


def adam_step_by_step():
    """After the warm-up: m = mean of the ranks' m_i up to 8-bit rounding; v is frozen; weight decay still applies."""
    hvd.init()
    lr, beta1, beta2, eps, decay, T = 0.01, 0.9, 0.99, 1e-3, 0.1, 3
    variable = keras.Variable(np.linspace(-1, 1, 64, dtype="float32"), name="x")
    free = keras.Variable(np.linspace(-1, 1, 8, dtype="float32"), name="free")
    free.constraint = keras.constraints.NonNeg()
    optimizer = keras.optimizers.AdamW(lr, beta_1=beta1, beta_2=beta2, epsilon=eps, weight_decay=decay)
    optimizer.exclude_from_weight_decay([free])
    optimizer = hvd.DistributedOptimizer(optimizer, algorithm=algorithms.QAdam(warmup_steps=T))
    x, m, v = variable.numpy().astype(float), np.zeros(64), np.zeros(64)

    @tf.function
    def step(g):
        optimizer.apply_gradients([(g, variable), (tf.ones(8), free)])

    for t in range(8):
        gradients = [np.sin(np.arange(64) + t + 0.3 * rank).astype("float32") for rank in range(hvd.size())]
        step(tf.constant(gradients[hvd.rank()]))
        g = np.mean(gradients, axis=0)
        m = beta1 * m + (1 - beta1) * g
        if t < T:
            v = beta2 * v + (1 - beta2) * g * g
        p = (np.sqrt(v) + eps) / np.sqrt(1 - beta2**min(t + 1, T))
        x = x - lr * decay * x - lr / (1 - beta1 ** (t + 1)) * m / p
        np.testing.assert_allclose(variable.numpy(), x, rtol=0, atol=2e-3 if t >= T else 1e-5)
        everyone = hvd.allgather(variable.numpy()[None])
        assert (everyone[0] == everyone[1]).all()
    assert int(optimizer.iterations) == 8
    assert (free.numpy() >= 0).all()
    # Two passes make one step; iterations count passes.
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), algorithm=algorithms.QAdam(warmup_steps=1),
                                         backward_passes_per_step=2)
    model = make_model()
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(*data_of(hvd.rank()), batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
    assert int(optimizer.iterations) == 8
    assert_same_everywhere(model)


def test_adam(run_ranks):
    run_ranks(2, adam_step_by_step)


class _Halved(keras.optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient / 2, variable, learning_rate)


def refusals():
    hvd.init()
    wrap = hvd.DistributedOptimizer
    for optimizer, fragment in (
        (keras.optimizers.SGD(), "needs keras.optimizers.Adam"), (keras.optimizers.Adam(amsgrad=True), "amsgrad=True"),
        (keras.optimizers.AdamW(clipnorm=1.0), "clipnorm=1.0"),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "LossScaleOptimizer"),
        (_Halved(), r"would bypass _Halved.update_step\(\)"),
    ):
        with pytest.raises(ValueError, match=f"QAdam cannot serve this optimizer: .*{fragment}"):
            wrap(optimizer, algorithm="qadam")
    model = make_model()
    scaled = keras.optimizers.LossScaleOptimizer(wrap(keras.optimizers.Adam(), algorithm="qadam"))
    model.compile(scaled, "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="mixed_bfloat16"):
        model.train_on_batch(*data_of(0))
    # State kept from gradients would have the unit of an old loss scale.
    for name, algorithm in (("PowerSGD", "powersgd"), ("ByteGrad", algorithms.ByteGrad(error_feedback=True))):
        inner = wrap(keras.optimizers.SGD(), algorithm=algorithm)
        model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse", run_eagerly=True)
        with pytest.raises(ValueError, match=f"{name} cannot serve a LossScaleOptimizer.*mixed_bfloat16"):
            model.train_on_batch(*data_of(0))
        with pytest.raises(ValueError, match=f"{name} cannot serve a LossScaleOptimizer.*mixed_bfloat16"):
            wrap(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), algorithm=algorithm)
    partial = wrap(keras.optimizers.Adam(), algorithm="qadam")
    partial.register_local_var(model.trainable_variables[0])
    model.compile(partial, "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="updates all weights itself"):
        model.train_on_batch(*data_of(0))


def test_what_adam_algorithms_refuse(run_ranks):
    run_ranks(2, refusals)


def consensus():
    hvd.init()
    model = make_model(seed=hvd.rank())
    model(np.zeros((1, 6), "float32"))
    own = flat(model)
    mean = hvd.allgather(own[None]).mean(axis=0)
    with hvd.consensus(model):
        np.testing.assert_allclose(flat(model), mean, rtol=1e-6, atol=1e-7)
        assert_same_everywhere(model)
    assert (flat(model) == own).all()
    variables = [tf.Variable([1.0 + hvd.rank()]), tf.Variable([hvd.rank()]), tf.Variable([2.0], dtype=tf.bfloat16)]
    hvd.consensus([*variables, variables[0]])
    assert variables[0].numpy() == 1.5 and variables[1].numpy() == hvd.rank() and variables[2].numpy() == 2
    everybody = hvd.ProcessSet([0])
    hvd.shutdown()
    hvd.init(process_sets=[everybody])
    if hvd.rank() == 0:
        hvd.consensus(model, everybody)
    assert (flat(model) == own).all()


def test_consensus(run_ranks):
    run_ranks(2, consensus)
