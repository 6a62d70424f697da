"""Collectives whose order differs between ranks, where TensorFlow has one thread to run ops on."""
import pytest

TENSORS = 200


def scrambled(rounds, inter_op_threads):
    import random

    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    tf.config.threading.set_inter_op_parallelism_threads(inter_op_threads)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    order = list(range(TENSORS))
    random.Random(rank).shuffle(order)

    @tf.function
    def step(inputs):
        reduced = {i: hvd.allreduce(inputs[i] * 2.0, op=hvd.Sum, name=f"tensor.{i}") for i in order}
        return [reduced[i] for i in range(TENSORS)]

    inputs = [tf.fill([1 + i % 7], float(i + rank)) for i in range(TENSORS)]
    for _ in range(rounds):
        for i, output in enumerate(step(inputs)):
            expected = 2.0 * sum(i + other for other in range(size))
            np.testing.assert_array_equal(output, np.full(1 + i % 7, expected, np.float32))


@pytest.mark.parametrize("n, inter_op_threads", [(2, 1), (3, 1), (3, 2)])
def test_independent_allreduces_in_another_order_on_each_rank(run_ranks, n, inter_op_threads):
    run_ranks(n, scrambled, arguments={"rounds": 5, "inter_op_threads": inter_op_threads}, timeout=100)


def chained():
    """Rank 0 reaches a after b, rank 1 b after a, and each result is needed by what follows."""
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    names = ["a", "b"] if hvd.rank() == 0 else ["b", "a"]

    @tf.function
    def step(x):
        first = {name: hvd.allreduce(x, op=hvd.Sum, name=name) for name in names}
        second = {name: hvd.allreduce(first[name] + 1.0, op=hvd.Sum, name=f"{name}.again") for name in reversed(names)}
        return second["a"] + second["b"]

    for _ in range(20):
        assert step(tf.constant(1.0)).numpy() == 2 * hvd.size() * (hvd.size() + 1)


def test_chains_in_another_order_on_each_rank(run_ranks):
    run_ranks(2, chained)


def in_a_loop():
    """A loop of tensorflow 1 runs several iterations at once, all with one name for the collective."""
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    tf.compat.v1.disable_v2_behavior()
    hvd.init()
    count = tf.compat.v1.placeholder(tf.int32, [])

    def body(i, total):
        return i + 1, total + hvd.allreduce(tf.cast(i, tf.float32) + float(hvd.rank()), op=hvd.Sum, name="in the loop")

    _, total = tf.while_loop(lambda i, _: i < count, body, [0, 0.0], parallel_iterations=20)
    ranks = hvd.size() * (hvd.size() - 1) / 2
    with tf.compat.v1.Session(config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1)) as session:
        for value in (0, 1, 100):
            assert session.run(total, {count: value}) == sum(hvd.size() * i + ranks for i in range(value))


@pytest.mark.parametrize("n", [2, 3])
def test_loop_with_parallel_iterations(run_ranks, n):
    run_ranks(n, in_a_loop)


def unused():
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()

    @tf.function
    def step(x):
        average = hvd.allreduce(x, name="only rank 0 looks")
        return average if hvd.rank() == 0 else x

    for _ in range(3):
        step(tf.ones([3]))


def test_result_that_only_one_rank_uses(run_ranks):
    run_ranks(2, unused)


def compiled(rounds):
    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()

    @tf.function(jit_compile=True)
    def step(inputs):
        return [hvd.allreduce(x * 2.0, op=hvd.Sum, name=f"tensor.{i}") for i, x in enumerate(inputs)]

    inputs = [tf.fill([1 + i % 7], float(i + hvd.rank())) for i in range(100)]
    for _ in range(rounds):
        for i, output in enumerate(step(inputs)):
            np.testing.assert_array_equal(output, np.full(1 + i % 7, 2.0 * sum(i + r for r in range(hvd.size()))))


@pytest.mark.parametrize("n", [2, 3])
def test_program_compiled_by_xla_with_one_thread(run_ranks, n):
    run_ranks(n, compiled, arguments={"rounds": 5}, timeout=100)
