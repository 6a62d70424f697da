"""Broadcasts of variables and objects, batch normalization over ranks, and elastic states."""
import pytest


def variables():
    import keras
    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    root = size - 1
    dtypes = ["float32", "float16", "bfloat16", "int64", "bool", "uint32", "uint8", "complex64", "complex128"]

    def make():
        return [tf.Variable(tf.cast(tf.fill([2, 2], rank + 1), dtype)) for dtype in dtypes]

    def check(variables):
        for variable, dtype in zip(variables, dtypes, strict=True):
            expected = 1 if dtype == "bool" else root + 1
            np.testing.assert_array_equal(tf.cast(variable, tf.int32), np.full((2, 2), expected))

    first = make()
    assert hvd.broadcast_variables(first, root) is None
    check(first)
    second = make()
    check(hvd.broadcast_(second, root, name="second"))
    check(second)
    third = make()

    @tf.function
    def step():
        hvd.broadcast_variables(third, root, inplace=True)

    step()
    check(third)

    # Complex numbers, also compiled; strings stay; an error names other unsupported dtypes.
    for make in (lambda f: f, tf.function, tf.function(jit_compile=True)):
        numbers = [tf.Variable(tf.complex(rank + part, -part))
                   for part in (tf.constant([1.0, 2.0]), tf.constant(1.0, tf.float64))]
        make(lambda numbers=numbers: hvd.broadcast_(numbers, root))()
        np.testing.assert_array_equal(numbers[0], [root + 1 - 1j, root + 2 - 2j])
        assert numbers[1].numpy() == root + 1 - 1j
    text, number = tf.Variable([f"of rank {rank}"]), tf.Variable(rank)
    for make in (lambda f: f, tf.function):
        make(lambda: hvd.broadcast_([text, number], root))()
        make(lambda: hvd.broadcast_([text], root))()
        assert number.numpy() == root
        number.assign(rank)
    hvd.broadcast_variables([text], root)
    assert text.numpy() == [f"of rank {rank}".encode()]
    values = hvd.broadcast_([number, text], root)
    assert values[0].numpy() == root and values[1].numpy() == text.numpy()
    odd = tf.Variable(tf.bitcast(tf.zeros([2], tf.uint8), tf.qint8), name="odd")
    with pytest.raises(ValueError, match="variable odd:0 cannot be broadcast: its dtype is qint8"):
        hvd.broadcast_variables([number, odd], root)

    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(4), keras.layers.Dropout(0.5)])
    hvd.broadcast_variables(model.variables, 0)
    for everyone in zip(*hvd.allgather_object([np.asarray(v) for v in model.variables]), strict=True):
        for other in everyone[1:]:
            np.testing.assert_array_equal(other, everyone[0])

    try:
        hvd.broadcast_global_variables(0)
    except RuntimeError as error:
        assert "eager" in str(error)
    else:
        raise AssertionError("no error")
    try:
        hvd.broadcast_variables([tf.Variable(tf.zeros([2 + rank]))], 0)
    except tf.errors.FailedPreconditionError as error:
        assert "Mismatched BROADCAST tensor shapes" in str(error)
    else:
        raise AssertionError("no error")

    same = hvd.broadcast_object({"rank": rank, "f": lambda: rank}, root)
    assert same["rank"] == root and same["f"]() == root
    assert hvd.broadcast_object_fn(root, name="again")((rank, None)) == (root, None)
    assert hvd.allgather_object(rank) == list(range(size))


@pytest.mark.parametrize("n", [2, 3])
def test_variables_and_objects(run_ranks, n):
    run_ranks(n, variables)


def batch_norm():
    import keras
    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    everyone = np.random.default_rng(0).normal(3.0, 2.0, (4 * size * (size + 1) // 2, 5, 3)).astype(np.float32)
    weights = np.random.default_rng(1).normal(size=everyone.shape).astype(np.float32)
    # Rank r has 4 (r + 1) of the samples.
    begin = 4 * rank * (rank + 1) // 2
    mine = slice(begin, begin + 4 * (rank + 1))

    def run(layer, x, w, make):
        @make
        def step(x, w):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
                loss = tf.reduce_sum(y * w)
            return y, tape.gradient(loss, [x, layer.gamma, layer.beta])

        layer.build(x.shape)
        return step(tf.constant(x), tf.constant(w))

    plain = keras.layers.BatchNormalization()
    expected, (expected_dx, expected_dgamma, expected_dbeta) = run(plain, everyone, weights, lambda f: f)
    for make in (lambda f: f, tf.function, lambda f: tf.function(f, jit_compile=True)):
        layer = hvd.SyncBatchNormalization()
        y, (dx, dgamma, dbeta) = run(layer, everyone[mine], weights[mine], make)
        np.testing.assert_allclose(y, expected[mine], atol=1e-5)
        np.testing.assert_allclose(dx, expected_dx[mine], atol=1e-4)
        # The gradients of gamma and beta are this rank's share; an optimizer sums them.
        np.testing.assert_allclose(hvd.allreduce(dgamma, op=hvd.Sum), expected_dgamma, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(hvd.allreduce(dbeta, op=hvd.Sum), expected_dbeta, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(layer.moving_mean, plain.moving_mean, rtol=1e-5)
        np.testing.assert_allclose(layer.moving_variance, plain.moving_variance, rtol=1e-5)
        np.testing.assert_allclose(layer(everyone[mine]), plain(everyone[mine]), atol=1e-5)
    for fused in (True, None):
        try:
            hvd.SyncBatchNormalization(fused=fused)
        except ValueError as error:
            assert "fused" in str(error)
        else:
            raise AssertionError("no error")
    assert hvd.SyncBatchNormalization().name.startswith("sync_batch_normalization")
    saved = keras.saving.serialize_keras_object(hvd.SyncBatchNormalization(epsilon=0.5))
    loaded = keras.saving.deserialize_keras_object(saved)
    assert type(loaded) is hvd.SyncBatchNormalization and loaded.epsilon == 0.5


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sync_batch_normalization(run_ranks, n):
    run_ranks(n, batch_norm)


def elastic_states():
    import keras
    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()
    rank = hvd.rank()
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    x, y = np.ones((4, 3), np.float32), np.ones((4, 4), np.float32)

    def values():
        return [np.array(variable) for variable in [*model.variables, *model.optimizer.variables]]

    def equal(one, other):
        return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    state = hvd.elastic.TensorFlowKerasState(model, epoch=rank)
    begin = values()
    model.train_on_batch(x, y)
    state.epoch = 5
    assert not equal(values(), begin)
    state.restore()                             # the constructor's values
    assert equal(values(), begin) and state.epoch == rank
    model.train_on_batch(x, y)
    state.save()
    saved = values()
    model.train_on_batch(x, y)
    state.restore()
    assert equal(values(), saved)
    state.sync()
    assert state.epoch == 0
    everyone = hvd.allgather_object(values())
    assert all(equal(everyone[0], other) for other in everyone)

    plain = tf.Variable([1.0 + rank])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=float(rank))
        session.run(variable.initializer)
        state = hvd.elastic.TensorFlowState([variable], session, batch=rank)
        session.graph.finalize()
        state.sync()
        assert (session.run(variable), state.batch) == (0, 0)
        state.restore()
    state = hvd.elastic.TensorFlowState([plain], batch=rank)
    state.sync()
    assert plain.numpy() == [1.0] and state.batch == 0

    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(state.batch)
        if len(calls) == 1:
            plain.assign([7.0])
            state.commit()
            plain.assign([8.0])
            raise hvd.HorovodInternalError("as if a rank had been lost")
        return plain.numpy()

    assert train(state) == [7.0] and len(calls) == 2
    try:
        hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(4)]))
    except ValueError as error:
        assert "must be built" in str(error)
    else:
        raise AssertionError("no error")


def test_elastic_states(run_ranks):
    run_ranks(2, elastic_states)
