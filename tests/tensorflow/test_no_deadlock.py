"""Collectives in different orders on different ranks, with a single TensorFlow thread to run ops on."""
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
    """Rank 0 reaches a after b, rank 1 b after a, and later operations need each result."""
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


def called_again():
    """Functions that reduce gradients, called by others; the first call's data is late on rank 0, the second's on 1."""
    import time

    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    v, u = tf.Variable([1.0, 1.0]), tf.Variable([1.0, 1.0])
    mean = np.mean(np.arange(hvd.size()) + 1.0)

    def inputs(x):
        def sleep(value):
            time.sleep(0.3)
            return value

        late = tf.reshape(tf.numpy_function(sleep, [x if hvd.rank() == 0 else x * 10], tf.float32), [2])
        return (late, x * 10) if hvd.rank() == 0 else (x, late)

    def gradients_of(*variables):
        @tf.function
        def gradients(x):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(tf.square(variable) * x) for variable in variables])
            return hvd.DistributedGradientTape(tape).gradient(loss, list(variables))

        return gradients

    of_both, compiled_of_both, of_v, of_u = gradients_of(v, u), gradients_of(v, u), gradients_of(v), gradients_of(u)

    @tf.function
    def same(x):
        first, second = inputs(x)
        return of_both(first) + of_both(second)

    @tf.function
    def different(x):
        first, second = inputs(x)
        return of_v(first) + of_u(second)

    @tf.function(jit_compile=True)
    def compiled(x):
        total = [a + b for a, b in zip(compiled_of_both(x * 3), compiled_of_both(x * -2), strict=True)]
        for _ in tf.range(2):
            total = [a + b for a, b in zip(total, compiled_of_both(x * 10), strict=True)]
        return total

    x = tf.fill([2], 1.0 + hvd.rank())
    for function, factors in ((same, (1, 1, 10, 10)), (different, (1, 10)), (compiled, (21, 21))):
        for _ in range(3):
            for gradient, factor in zip(function(x), factors, strict=True):
                np.testing.assert_allclose(gradient, [2 * mean * factor] * 2, rtol=1e-6)


def test_functions_called_by_others(run_ranks):
    run_ranks(2, called_again, timeout=100)


def join_and_barrier():
    """They run after everything that was traced before them, also in loops."""
    import time

    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()
    total = tf.Variable(0.0)

    def slow(value):
        time.sleep(0.1)
        return value

    for compiled in (False, True):
        @tf.function(jit_compile=compiled)
        def join(x, n, compiled=compiled):
            for _ in tf.range(n):
                if not compiled:
                    x = tf.reshape(tf.numpy_function(slow, [x], tf.float32), [])
                total.assign_add(hvd.allreduce(x, op=hvd.Sum, name="in the loop"))
            return hvd.join()

        total.assign(0.0)
        join(tf.constant(1.0), tf.constant(1 + 2 * hvd.rank()))
        assert total == (2.0 if hvd.rank() == 0 else 4.0)
    happened = []

    @tf.function
    def barrier():
        tf.numpy_function(lambda: slow(happened.append("before") or 1), [], tf.int64)
        hvd.barrier()
        tf.numpy_function(lambda: happened.append("after") or 1, [], tf.int64)

    hvd.barrier()
    barrier()
    assert happened == ["before", "after"]


def test_join_and_barrier(run_ranks):
    run_ranks(2, join_and_barrier, timeout=100)


def in_a_loop():
    """A loop of TensorFlow 1 runs several iterations at once, which all use one name for the collective."""
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
