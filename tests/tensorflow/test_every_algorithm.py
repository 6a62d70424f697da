"""Every registered algorithm with every kind of TensorFlow optimizer trains, or raises an error with its needs.

tests/keras/test_algorithms.py trains with Keras' fit().
"""
import pytest


def every_algorithm():
    import keras
    import numpy as np
    import tensorflow as tf
    import tf_keras

    import bagua_hvd.tensorflow as hvd
    from every_algorithm import ADAM, NAMES, make

    hvd.init()
    v1 = tf.compat.v1

    def train(plain, algorithm, delay=0):
        weights = [tf.Variable(tf.ones(shape)) for shape in ((6, 5), (5,))]
        optimizer = hvd.DistributedOptimizer(plain, algorithm=algorithm, delay=delay)

        def loss():
            return sum(tf.reduce_sum((1.0 + hvd.rank()) * tf.square(weight)) for weight in weights)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                value = loss()
            optimizer.apply_gradients(list(zip(tape.gradient(value, weights), weights, strict=True)))

        for _ in range(5):
            optimizer.minimize(loss, var_list=weights) if isinstance(plain, v1.train.Optimizer) else step()
        if algorithm.asynchronous:
            algorithm.abort()
        return weights, float(loss())

    for name in NAMES:
        print(name, flush=True)
        kinds = [keras.optimizers.Adam(0.01), tf_keras.optimizers.Adam(0.01)] if name in ADAM else [
            keras.optimizers.SGD(0.05), tf_keras.optimizers.SGD(0.05), v1.train.GradientDescentOptimizer(0.05)]
        for plain in kinds:
            weights, loss = train(plain, make(name))
            everyone = hvd.allgather(weights[0][None])
            assert np.isfinite(everyone).all() and loss < 35 * (1 + hvd.rank()), name
            if not make(name).models_differ:
                assert (everyone[0] == everyone[1]).numpy().all(), name
        if name in ADAM:
            with pytest.raises(ValueError, match=f"{type(make(name)).__name__} .*optimizer of Keras"):
                hvd.DistributedOptimizer(v1.train.AdamOptimizer(0.01), algorithm=make(name))
        if name in ADAM or make(name).remembers_gradients:      # its state would have the unit of an old loss scale
            with pytest.raises(ValueError, match="cannot serve .*LossScaleOptimizer"):
                scaled = keras.optimizers.LossScaleOptimizer(type(kinds[0])(0.01))
                hvd.DistributedOptimizer(scaled, algorithm=make(name))
        if make(name).gradients_only:
            weights, loss = train(keras.optimizers.SGD(0.05), make(name), delay=1)
            assert loss < 35 * (1 + hvd.rank()), name
        else:
            with pytest.raises(ValueError, match="delay=1 is for algorithms that communicate gradients in every step"):
                hvd.DistributedOptimizer(kinds[0].__class__(0.01), algorithm=make(name), delay=1)
            with pytest.raises(ValueError, match="which a tape does not see"):
                hvd.DistributedGradientTape(tf.GradientTape(), algorithm=make(name))


@pytest.mark.long
@pytest.mark.timeout(400)
def test_every_algorithm(run_ranks):
    pytest.importorskip("tf_keras")
    run_ranks(2, every_algorithm, timeout=380)
