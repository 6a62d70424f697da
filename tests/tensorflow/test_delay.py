"""delay=1 in TensorFlow: optimizers and tapes apply gradients one step late; against NumPy.

    x_{t+1} = x_t - step(g_{t-1})       g_{-1} = 0      g_t = mean of the ranks' gradients at x_t
"""
import pytest

STEPS, LR, MOMENTUM = 5, 0.25, 0.5
SHAPES = [(3, 2), (4,), ()]


def numpy_of(rank, t):
    """c_t of a rank: its gradient in step t is x - c_t, for each variable."""
    import numpy as np

    return [np.random.default_rng([rank, t, i]).standard_normal(shape).astype("float32")
            for i, shape in enumerate(SHAPES)]


def pipe_sgd(n, passes=1):
    """The weights after each step, with momentum."""
    import numpy as np

    x = [np.ones(shape, "float32") for shape in SHAPES]
    momentum = [np.zeros(shape) for shape in SHAPES]
    late = [np.zeros(shape) for shape in SHAPES]
    for t in range(STEPS):
        sent = [sum(xi - numpy_of(rank, passes * t + p)[i] for rank in range(n) for p in range(passes)) / n
                for i, xi in enumerate(x)]
        momentum = [MOMENTUM * m + g for m, g in zip(momentum, late, strict=True)]
        x = [xi - LR * m for xi, m in zip(x, momentum, strict=True)]
        late = sent
        yield x


def assert_pipe_sgd(variables, expected, what):
    import numpy as np

    for variable, wanted in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), wanted, rtol=1e-4, atol=1e-5, err_msg=what)


def optimizers():
    """Keras 3, eager, in a graph, compiled by XLA, by passes; and tf.compat.v1 in eager mode."""
    import keras
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    for mode in ("eager", "graph", "xla", "passes", "v1", "fp16"):
        passes = 2 if mode == "passes" else 1
        variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]
        if mode == "v1":
            plain = tf.compat.v1.train.MomentumOptimizer(LR, MOMENTUM)
        else:
            plain = keras.optimizers.SGD(LR, MOMENTUM)
        compression = hvd.Compression.fp16 if mode == "fp16" else hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(plain, delay=1, backward_passes_per_step=passes, compression=compression)

        def step(*targets, variables=variables, optimizer=optimizer):
            gradients = [variable - target for variable, target in zip(variables, targets, strict=True)]
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

        if mode == "v1":                        # it reduces in compute_gradients()
            def step(*targets, variables=variables, optimizer=optimizer):
                optimizer.minimize(lambda: sum(tf.reduce_sum((v - c) ** 2) / 2
                                               for v, c in zip(variables, targets, strict=True)), var_list=variables)
        if mode in ("graph", "xla"):
            step = tf.function(step, jit_compile=mode == "xla")
        for t, expected in enumerate(pipe_sgd(n, passes)):
            for p in range(passes):
                step(*map(tf.constant, numpy_of(rank, passes * t + p)))
            if mode == "fp16":
                assert all(abs(v.numpy() - wanted).max() < 0.01 for v, wanted in zip(variables, expected, strict=True))
            else:
                assert_pipe_sgd(variables, expected, f"{mode}, step {t}")


@pytest.mark.parametrize("n", [2, 3])
def test_optimizers(run_ranks, n):
    run_ranks(n, optimizers, timeout=110)


def tapes():
    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd
    from two_phases import TwoPhases

    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]
    for algorithm in ("gradient_allreduce", TwoPhases):

        def gradients(*targets, algorithm=algorithm):
            with tf.GradientTape() as tape:
                loss = sum(tf.reduce_sum((v - c) ** 2) / 2 for v, c in zip(variables, targets, strict=True))
            return hvd.DistributedGradientTape(tape, algorithm=algorithm, delay=1).gradient(loss, variables)

        late = None
        for t in range(STEPS):
            made = (tf.function(gradients) if t > 2 else gradients)(*map(tf.constant, numpy_of(rank, t)))
            if late is None:
                assert not any(np.any(g.numpy()) for g in made)
            elif algorithm == "gradient_allreduce":
                assert_pipe_sgd(made, late, f"step {t}")
            else:
                assert any(np.any(g.numpy()) for g in made)
            late = [1 - np.mean([numpy_of(r, t)[i] for r in range(n)], 0) for i in range(len(SHAPES))]
    # Gradients without a previous step are refused.
    x = tf.constant([1.0, 2.0])

    def refused(sentence, call, **arguments):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            table = variables[0]
            loss = tf.reduce_sum(x * x) + tf.reduce_sum(tf.gather(table, [0, 1]))
        with pytest.raises(ValueError, match=sentence):
            call(hvd.DistributedGradientTape(tape, delay=1, **arguments), loss)

    refused("the gradient of a tensor cannot be delayed.*tape without delay",
            lambda tape, loss: tape.gradient(loss, x))
    refused("IndexedSlices cannot be delayed.*Pass sparse_as_dense=True",
            lambda tape, loss: tape.gradient(loss, [variables[0]]))
    refused("Jacobian matrices cannot be delayed", lambda tape, loss: tape.jacobian(loss, variables[0]))
    refused("delay=1 cannot be combined with op=Adasum", lambda *_: None, op=hvd.Adasum)
    refused("communicates weights|in every step", lambda *_: None, algorithm="decentralized")


def test_tapes(run_ranks):
    run_ranks(2, tapes, timeout=60)
