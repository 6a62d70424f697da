"""The order of events in a step: communication during the backward pass, loops over datasets, averages of weights."""
import functools
import gc
import json
import time

import pytest


def overlap(folder):
    """The first layer's gradient waits until the timeline shows the reduction of the last layer's."""
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    tf.config.threading.set_inter_op_parallelism_threads(4)
    hvd.init()
    path = f"{folder}/timeline.json"
    hvd.start_timeline(path)
    first, last = tf.Variable(tf.ones([3, 3])), tf.Variable(tf.ones([3, 3]))
    waiting = tf.Variable(False)

    def until_last_layer_is_reduced(gradient, wait):
        deadline = time.monotonic() + 60
        while wait and hvd.rank() == 0 and reduced_buckets(path).count("gradients.0.1") < 2:
            assert time.monotonic() < deadline, "nothing is communicated before the last gradient exists"
            time.sleep(0.01)
        return gradient

    @tf.custom_gradient
    def delayed(weight):
        def gradient(upstream):
            result = tf.numpy_function(until_last_layer_is_reduced, [upstream, waiting], tf.float32)
            result.set_shape(upstream.shape)
            return result
        return tf.identity(weight), gradient

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x @ delayed(first) @ last)
        return hvd.DistributedGradientTape(tape, groups=[[first], [last]]).gradient(loss, [first, last])

    x = tf.fill([1, 3], 1.0 + hvd.rank())
    step(x)         # ranks agree on sparse gradients in the first step, so reductions begin after its backward pass
    waiting.assign(True)
    for gradient in step(x):
        assert (gradient.numpy() == 3 * sum(1.0 + rank for rank in range(hvd.size())) / hvd.size()).all()
    hvd.stop_timeline()
    if hvd.rank() == 0:
        assert sorted(reduced_buckets(path)[:2]) == ["gradients.0.0", "gradients.0.1"]
        assert reduced_buckets(path)[2:] == ["gradients.0.1", "gradients.0.0"]


def reduced_buckets(path):
    """The buckets whose reduction has ended, in this order; none while the file is being written."""
    try:
        with open(path) as file:
            events = json.load(file)
    except ValueError:
        return []
    names = {event["pid"]: event["args"].get("name", "") for event in events if event.get("name") == "process_name"}
    ended = [names[event["pid"]] for event in events if event["ph"] == "E" and "args" in event]
    return [name for name in ended if name.startswith("gradients.") and name[-1].isdigit()]


def test_gradients_travel_within_the_backward_pass(run_ranks, tmp_path):
    run_ranks(2, overlap, arguments={"folder": str(tmp_path)}, env={"HOROVOD_TIMELINE": "DYNAMIC"})


def gradients_in_any_order():
    """200 gradients, computed in another order in each rank's graph, on one inter-op thread."""
    import random

    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    variables = [tf.Variable(tf.fill([1 + i % 7], float(i))) for i in range(200)]
    order = list(range(len(variables)))
    random.Random(hvd.rank()).shuffle(order)

    @tf.function
    def step(factor):
        with tf.GradientTape() as tape:
            loss = 0.0
            for i in order:
                loss += tf.reduce_sum(tf.square(variables[i])) * factor
        groups = [variables[i:i + 3] for i in range(0, 200, 3)]
        return hvd.DistributedGradientTape(tape, groups=groups).gradient(loss, variables)

    factor = np.mean(1.0 + np.arange(hvd.size()))
    for _ in range(5):
        for i, gradient in enumerate(step(tf.constant(1.0 + hvd.rank()))):
            np.testing.assert_allclose(gradient, np.full(1 + i % 7, 2.0 * i * factor), rtol=1e-6)


def test_200_gradients_in_scrambled_order(run_ranks):
    run_ranks(2, gradients_in_any_order)


def loops_over_datasets():
    """Collectives and a reduced step per batch, in the loop that tf.function makes of `for batch in dataset`."""
    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    weight = tf.Variable(1.0)
    values = np.arange(12, dtype=np.float32) + 100 * rank
    dataset = tf.data.Dataset.from_tensor_slices(values).batch(2).map(
        lambda x: x + 1.0, num_parallel_calls=2).prefetch(2)

    @tf.function
    def epoch(batches):
        total = 0.0
        for batch in batches:
            total += tf.reduce_sum(hvd.allreduce(batch, op=hvd.Sum))
            gathered = hvd.allgather(batch)
            with tf.GradientTape() as tape:
                loss = weight * tf.reduce_mean(batch)
            weight.assign_sub(0.001 * hvd.DistributedGradientTape(tape).gradient(loss, [weight])[0])
            total += tf.cast(tf.shape(gathered)[0], tf.float32)
        return total

    everyone = np.stack([np.arange(12) + 100 * r + 1 for r in range(size)])
    for number in range(1, 4):
        assert epoch(dataset) == everyone.sum() + 6 * 2 * size
        expected = 1 - 0.001 * number * everyone.reshape(size, 6, 2).mean(axis=(0, 2)).sum()
        np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-4)


def test_loops_over_datasets(run_ranks):
    run_ranks(2, loops_over_datasets)


def train_in_session(tf, hvd, algorithm):
    """The weight after each of two SGD steps in a graph of TensorFlow 1."""
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        weight = v1.get_variable("w", initializer=tf.ones((3,)), use_resource=algorithm != "local_sgd")
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), algorithm=algorithm)
        step = optimizer.minimize((1.0 + hvd.rank()) * tf.reduce_sum(weight))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            results = []
            for _ in range(2):
                session.run(step)
                results.append(session.run(weight)[0])
            return results


def train_by(optimizer, compiled_by=lambda function: function):
    """The same in a custom loop: with apply_gradients(), or minimize() of TensorFlow 1."""
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    weight = tf.Variable(tf.ones((3,)))

    def loss():
        return (1.0 + hvd.rank()) * tf.reduce_sum(weight)

    @compiled_by
    def step():
        if isinstance(optimizer, tf.compat.v1.train.Optimizer):
            optimizer.minimize(loss, var_list=[weight])
        else:
            with tf.GradientTape() as tape:
                value = loss()
            optimizer.apply_gradients([(tape.gradient(value, weight), weight)])

    results = []
    for _ in range(2):
        step()
        results.append(weight.numpy()[0])
    return results


def weights():
    """SGD with averages of weights after each step, each second one, or before it; with every kind of optimizer."""
    import sys

    import keras
    import numpy as np
    import pytest
    import tensorflow as tf
    import tf_keras

    import bagua_hvd.tensorflow as hvd
    from bagua_hvd.algorithms import Decentralized, LocalSGD

    hvd.init()
    rank, v1 = hvd.rank(), tf.compat.v1
    g, mean = 0.5 * (1.0 + rank), 0.75
    assert "tf_keras" in sys.modules
    for algorithm, expected in ((LocalSGD(1), [1 - mean, 1 - 2 * mean]), (LocalSGD(2), [1 - g, 1 - 2 * mean]),
                                (Decentralized(), [1 - g, 1 - mean - g])):
        found = [
            train_in_session(tf, hvd, algorithm),
            *(train_by(hvd.DistributedOptimizer(optimizer, algorithm=algorithm), mode)
              for mode in (lambda function: function, tf.function)
              for optimizer in (v1.train.GradientDescentOptimizer(0.5), tf_keras.optimizers.SGD(0.5),
                                tf_keras.optimizers.legacy.SGD(0.5), keras.optimizers.SGD(0.5))),
        ]
        for number, results in enumerate(found):
            np.testing.assert_allclose(results, expected, rtol=1e-6, err_msg=f"{algorithm} {number}")

    # Adam of tf_keras: after the warm-up momenta are averaged, and the ranks stay equal.
    adam = hvd.DistributedOptimizer(tf_keras.optimizers.Adam(0.1), algorithm=hvd.algorithms.QAdam(warmup_steps=1))
    results = train_by(adam, tf.function)
    np.testing.assert_allclose(results, [0.9, 0.8], rtol=1e-2)
    assert int(adam.iterations) == 2
    everyone = hvd.allgather(tf.constant([results]))
    assert (everyone[0] == everyone[1]).numpy().all()

    # An algorithm's state, loaded into another optimizer: its first step continues as the second one.
    variable = tf.Variable(1.0)
    first, second = (hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.5), algorithm=LocalSGD(2)) for _ in range(2))
    assert first.algorithm_state_dict() == {}
    first.apply_gradients([(tf.constant(1.0 + rank), variable)])
    assert variable.numpy() == 1 - g
    second.load_algorithm_state_dict(first.algorithm_state_dict())
    second.apply_gradients([(tf.constant(1.0 + rank), variable)])
    assert variable.numpy() == 1 - 2 * mean

    unseen = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), algorithm="decentralized")
    with pytest.raises(RuntimeError, match="get them from its minimize"):
        unseen.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])
    for refused, fragment in (
        (lambda: hvd.DistributedOptimizer(tf_keras.optimizers.SGD(), algorithm="qadam"), "Adam or AdamW, not SGD"),
        (lambda: hvd.DistributedOptimizer(v1.train.AdamOptimizer(), algorithm="qadam"), "optimizer of Keras"),
        (lambda: hvd.DistributedGradientTape(tf.GradientTape(), algorithm="decentralized"),
         "which a tape does not see: .*DistributedOptimizer.*apply_gradients"),
        (lambda: hvd.DistributedGradientTape(tf.GradientTape(), algorithm="onebit_adam"), "plain tf.GradientTape"),
    ):
        with pytest.raises(ValueError, match=fragment):
            refused()


def uneven():
    """After join() ranks that have made different numbers of steps make the next ones alike: they agree anew."""
    import keras
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd
    from bagua_hvd.algorithms import LocalSGD

    hvd.init()
    rank = hvd.rank()

    def plain(function):
        return function

    for compiled_by, joined_by in ((plain, plain), (tf.function, plain), (tf.function, tf.function),
                                   (tf.function, functools.partial(tf.function, jit_compile=True))):
        join = joined_by(lambda: hvd.join())
        for algorithm, options, same in ((LocalSGD(2), {}, [0, 2, 4, 6]),
                                         (LocalSGD(2, full_steps=2), {}, [0, 2, 4, 6]),
                                         (None, {"delay": 1}, list(range(8)))):
            weight = tf.Variable([0.0])
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), algorithm=algorithm, **options)

            @compiled_by
            def step(gradient, weight=weight, optimizer=optimizer):
                optimizer.apply([gradient], [weight])

            for _ in range(3 - rank):
                step(tf.constant([1.0]))
            last = join()
            assert last.dtype == tf.int32 and last in (0, 1)
            weight.assign([0.0])        # the next epoch
            found = []
            for number in range(8):
                step(tf.constant([number + 2.0 * rank]))
                found.append(float(weight[0]))
            everyone = hvd.allgather(tf.constant([found])).numpy()
            assert (everyone[0] == everyone[1]).nonzero()[0].tolist() == same, (algorithm, everyone)
            if algorithm is None:
                assert found[:3] == [0.0, -1.0, -3.0], found


def test_uneven(run_ranks):
    run_ranks(2, uneven, timeout=100)


def weights_in_communicate():
    """g = mean_i g_i + x / 2; and the errors for an algorithm that reads x, or Adam, without declaring it."""
    import keras
    import numpy as np
    import pytest
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd
    from bagua_hvd.primitives import c_fp_s

    class Decay(hvd.algorithms.Algorithm):
        def communicate(self, bucket, group):
            bucket.write(bucket.read() + bucket.flat(bucket.weights) / 2)
            return c_fp_s(bucket, group)

    class AnnouncedDecay(Decay):
        uses_weights = ("communicate",)

    class Moments(Decay):
        def communicate(self, bucket, group):
            assert bucket.model.adam().member(0).m
            return c_fp_s(bucket, group)

    hvd.init()
    for mode in (lambda function: function, tf.function):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), algorithm=AnnouncedDecay)
        np.testing.assert_allclose(train_by(optimizer, mode), [0, -0.75], atol=1e-6)
        for algorithm, sentence in ((Decay, r"Decay reads weights in communicate\(\) .* set uses_weights = \('com"),
                                    (Moments, "Moments reads the optimizer's Adam .* set uses_adam = True in its")):
            optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.5), algorithm=algorithm)
            with pytest.raises(tf.errors.InvalidArgumentError, match=sentence):
                train_by(optimizer, mode)


def test_weights_in_communicate(run_ranks):
    run_ranks(2, weights_in_communicate)


def test_algorithms_on_weights(run_ranks):
    pytest.importorskip("tf_keras")
    run_ranks(2, weights)


def numbers():
    """Reducers of a rank that joins get the numbers of equal ones of rank 0, in the order of use."""
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd
    from bagua_hvd.job.runtime import runtime
    from bagua_hvd.reduction.agreement import share_numbers
    from bagua_hvd.reduction.options import GradientOptions
    from bagua_hvd.tensorflow.reduction import Reduction

    hvd.init()
    runtime.options.elastic = True
    variables = [tf.Variable(value, name=name) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))]

    def use(*uses):
        """The numbers of the Reducers, after a step of each."""
        numbers = []
        for reduction, places in uses:
            chosen = [variables[place] for place in places]
            reduced = reduction([variable * hvd.rank() for variable in chosen], chosen)
            assert [float(each) for each in reduced] == [float(variable) / 2 for variable in chosen]
            numbers.append(reduction._step_of(chosen).reducer.number)
        return numbers

    def reductions():
        return [Reduction(GradientOptions().check()) for _ in range(2)]

    one, other = reductions()
    if hvd.rank() == 0:
        for reduction, places in ((one, (0, 1)), (one, (0,)), (other, (0, 1)), (one, (2,))):
            reduction._step_of([variables[place] for place in places])
    share_numbers((), lambda mine: hvd.broadcast_object(mine, 0))
    for _ in range(2):
        uses = (one, (2,)), (one, (0, 1)), (other, (0, 1)), (other, (2,)), (one, (0,))
        assert use(*uses) == [3, 0, 2, 4, 1]
    if hvd.rank() == 1:
        one, other = reductions()
        gc.collect()
    runtime.changes += 1        # as init() does when a rank joins
    share_numbers((), lambda mine: hvd.broadcast_object(mine, 0))
    # A new one takes the place of an old one that is not used any more, and that rank 1 does not have.
    again, taken = reductions()
    assert use((again, (0,)), (again, (1, 2)), (one, (2,)), (other, (2,))) == [1, 5, 3, 4]
    # One after the other on the same variables: a rank joins when the first is not used any more.
    first, second = reductions()
    if hvd.rank() == 0:
        for reduction in (first, second):
            assert reduction._step_of(variables[1:]).reducer.number in (6, 7)
    share_numbers((), lambda mine: hvd.broadcast_object(mine, 0))
    assert use((second, (1, 2)), (again, (1, 2))) == [5, 6]
    runtime.options.elastic = False
    use((taken, (0,)))
    made, _ = reductions()
    for count in (1, 2):
        made([tf.constant(1.0)] * count, variables[:count])
    for _ in range(3):      # nothing is kept of deleted variables
        made([tf.constant(1.0)], [tf.Variable(1.0)])
        gc.collect()
    assert len(made._made) == 3
    # Tapes with a new Algorithm object in each step share the reductions of the first one.
    from bagua_hvd.algorithms import Auto, ByteGrad
    from bagua_hvd.tensorflow.reduction import shared_reductions

    def step(**options):
        with tf.GradientTape() as tape:
            loss = variables[0] * (1.0 + hvd.rank()) + variables[1]
        tape = hvd.DistributedGradientTape(tape, **options)
        assert type(tape) is type(hvd.DistributedGradientTape(tf.GradientTape()))
        return tape.gradient(loss, variables[:2])

    same = ByteGrad(error_feedback=True)
    for _ in range(2):
        for algorithm in (ByteGrad(), same, ByteGrad(error_feedback=True)):
            step(algorithm=algorithm)
    assert len(shared_reductions._reductions) == 3       # including plain averages
    for _ in range(2):
        step(algorithm=Auto())                      # an algorithm that contains others
    assert len(shared_reductions._reductions) == 4
    # After another init(), old and new ones have different numbers.
    hvd.shutdown()
    hvd.init()

    @tf.function
    def both():
        return [*step(op=hvd.Sum), *taken([tf.constant(1.0 + hvd.rank())], variables[:1])]

    step(op=hvd.Sum)        # takes 0, which was that of `taken`
    assert [gradient.numpy() for gradient in both()] == [3, 2, 1.5]
    assert [reducer.number for reducer in taken.reducers()] == [1]


def test_numbers_of_reducers_made_late(run_ranks):
    run_ranks(2, numbers)
