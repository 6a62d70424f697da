"""Collectives compiled by XLA whose results have other shapes than their inputs, or none."""
import pytest

from locales import make_german, use_german


def values():
    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    subset = hvd.ProcessSet([0])
    hvd.init(process_sets=[subset])
    rank, size = hvd.rank(), hvd.size()
    x = tf.reshape(tf.range(2.0 * size * 3), [2 * size, 3]) + 100.0 * rank
    everyone = np.stack([np.arange(2.0 * size * 3).reshape(2 * size, 3) + 100 * r for r in range(size)])
    weights = tf.random.stateless_uniform([2 * size * size, 3], [1, rank])

    @tf.function(jit_compile=True)
    def forward(x):
        single, pair = hvd.allgather(x), hvd.grouped_allgather([x, tf.cast(x[:1], tf.int8)])
        received = hvd.alltoall(x)
        last = hvd.join()
        hvd.barrier()
        return single, pair, received, last

    for _ in range(3):
        single, pair, received, last = forward(x)
        np.testing.assert_array_equal(single, everyone.reshape(-1, 3))
        np.testing.assert_array_equal(pair[0], single)
        np.testing.assert_array_equal(pair[1], everyone[:, 0].astype(np.int8))
        np.testing.assert_array_equal(received, everyone[:, 2 * rank:2 * rank + 2].reshape(-1, 3))
        assert 0 <= last.numpy() < size and last.dtype == tf.int32

    def gradients(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            gathered = tf.reduce_sum(hvd.allgather(x) * weights)
            exchanged = tf.reduce_sum(hvd.alltoall(x) * weights[:2 * size])
            scattered = tf.reduce_sum(hvd.reducescatter(x, op=hvd.Sum) * weights[:2])
        return [tape.gradient(target, x) for target in (gathered, exchanged, scattered)]

    for compiled, plain in zip(tf.function(gradients, jit_compile=True)(x), gradients(x), strict=True):
        assert compiled.shape == x.shape
        np.testing.assert_allclose(compiled, plain, rtol=1e-6)
    many = tf.reshape(x, [2 * size, *[1] * 97, 3])         # number of dimensions; TensorFlow allows 254
    total = tf.function(lambda many: hvd.grouped_allreduce([many, x], op=hvd.Sum)[0], jit_compile=True)(many)
    np.testing.assert_array_equal(tf.reshape(total, x.shape), everyone.sum(0))
    if rank == 0:
        alone = tf.function(lambda x: hvd.allgather(x, process_set=subset), jit_compile=True)
        np.testing.assert_array_equal(alone(x), x)


def test_values(run_ranks):
    run_ranks(2, values)


def threads():
    """The thread that ends collectives blocks signals, as the engine's thread does, for Python's threads."""
    import signal
    import time
    from pathlib import Path

    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    def blocking():
        masks = [int(line.split()[1], 16) for status in Path("/proc/self/task").glob("*/status")
                 for line in status.read_text().splitlines() if line.startswith("SigBlk")]
        return sum(mask >> (signal.SIGTERM - 1) & 1 and not mask >> (signal.SIGSEGV - 1) & 1 for mask in masks)

    hvd.init()
    while not (engine := blocking()):       # a thread that has not run yet blocks faults, too
        time.sleep(0.01)
    tf.function(lambda: hvd.allreduce(tf.ones(2), name="first"))()
    assert blocking() == engine + 1


def test_threads(run_ranks):
    run_ranks(2, threads)


def decimal_comma():
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    use_german()
    hvd.init()
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.25),
                       jit_compile=True)
    assert step(tf.ones([3])).numpy().tolist() == [1.25] * 3


def test_decimal_comma(run_ranks, tmp_path):
    run_ranks(2, decimal_comma, env=make_german(tmp_path))


def refusals():
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()

    def compiled(function):
        return tf.function(function, jit_compile=True)

    # Different rows on ranks are known only at run time: all ranks get an error, and the job continues.
    ragged = tf.ones([1 + hvd.rank(), 2])
    with pytest.raises(tf.errors.InternalError, match="first dimensions differ.*use jit_compile=False"):
        compiled(hvd.allgather)(ragged)
    assert hvd.allgather(ragged).shape[0] == 3
    with pytest.raises(NotImplementedError, match="alltoall with splits.*use jit_compile=False"):
        compiled(lambda x: hvd.alltoall(x, splits=[1, 1]))(tf.ones([2]))
    with pytest.raises(tf.errors.InternalError, match="rank-zero"):
        compiled(hvd.allgather)(tf.ones([]))
    with pytest.raises(tf.errors.InternalError, match="rank-zero"):
        compiled(hvd.reducescatter)(tf.ones([]))
    for collective in (hvd.allgather, hvd.reducescatter, hvd.allreduce, hvd.alltoall):
        function = tf.function(collective, jit_compile=True, input_signature=[tf.TensorSpec([None, 3])])
        with pytest.raises(ValueError, match="has the shape .None, 3.: a function compiled by XLA communicates tensors "
                                             "of known shapes only; use jit_compile=False"):
            function(tf.ones([4, 3]))

    def uneven(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.reducescatter(x)
        return tape.gradient(y, x)

    with pytest.raises(NotImplementedError, match="parts differ in size.*use jit_compile=False"):
        compiled(uneven)(tf.ones([3]))
    assert hvd.allreduce(1.0, op=hvd.Sum) == 2


def test_refusals(run_ranks):
    run_ranks(2, refusals)
