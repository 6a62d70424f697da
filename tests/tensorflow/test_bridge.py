"""The step bridge: the reducer inside eager code, graphs and programs compiled by XLA."""
import pytest


def reducer_in_every_way(algorithm):
    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd
    from bagua_hvd.algorithms import base
    from bagua_hvd.core import native
    from bagua_hvd.reduction.reducer import Reducer
    from bagua_hvd.tensorflow.bridge import Bridge
    from bagua_hvd.training.buckets import Member
    from bagua_hvd.training.source import Source

    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    shapes = [[3 + i % 5, 2] for i in range(40)]

    class Views(Source):
        def __init__(self):
            self.views = {}

        def prepare(self, index):
            return self.views[index]

        gradient = prepare

        def weight(self, index):
            raise NotImplementedError

        def discard(self):
            self.views = {}

    views = Views()
    members = [Member(f"w{i}", tuple(shape), native.FLOAT32) for i, shape in enumerate(shapes)]
    reducer = Reducer(views, members, base.choose(algorithm, True), hvd.global_process_set)

    def put(index, view):
        assert view.src == view.dst and view.shape == tuple(shapes[index])
        views.views[index] = view
        reducer.gradient_ready(index)

    def wait():
        reducer.synchronize()
        reducer.stepped()

    bridge = Bridge(put, wait)

    def step(x):
        gradients = [tf.fill(shape, float(i)) * x for i, shape in enumerate(shapes)]
        return [gradients[0] + 0.0, *bridge.exchange(gradients)]

    x = tf.constant(float(rank + 1))
    mean = (size + 1) / 2
    for way in (lambda f: f, tf.function, lambda f: tf.function(f, jit_compile=True)):
        function = way(step)
        for _ in range(4):
            first, *reduced = function(x)
            np.testing.assert_array_equal(first, np.zeros(shapes[0]))
            for i, tensor in enumerate(reduced):
                # All elements of a gradient are equal, but the codec sees whole buckets.
                tolerance = 1e-6 if algorithm is None else 40 * size / 250
                np.testing.assert_allclose(tensor, np.full(shapes[i], i * mean), atol=tolerance, rtol=1e-6)
    assert reducer.synchronizations == 12


@pytest.mark.parametrize("algorithm", [None, "bytegrad"])
@pytest.mark.parametrize("n", [1, 3])
def test_reducer(run_ranks, n, algorithm):
    run_ranks(n, reducer_in_every_way, arguments={"algorithm": algorithm})


def failures():
    import pytest
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd
    from bagua_hvd.core import native
    from bagua_hvd.tensorflow.bridge import Bridge

    class Interrupted(Exception):
        pass

    def lost():
        native.raise_failure(native.Failure(native.ERR_PEER_LOST, "rank 7 was lost"))

    def mismatch(index, view):
        native.raise_failure(native.Failure(native.ERR_MISMATCH, "Mismatched everything"))

    def wrong():
        raise ValueError("a wrong gradient")

    def other(index, view):
        raise Interrupted("something else")

    def fine(*_):
        pass

    cases = [
        (fine, lost, tf.errors.UnknownError, hvd.HorovodInternalError, "rank 7 was lost"),
        (mismatch, fine, tf.errors.FailedPreconditionError, hvd.HorovodInternalError, "Mismatched everything"),
        (fine, wrong, tf.errors.InvalidArgumentError, ValueError, "a wrong gradient"),
        (other, fine, tf.errors.UnknownError, Interrupted, "Interrupted: something else"),
    ]
    xs = [tf.ones([2]), tf.ones([3])]
    for put, wait, tf_error, error, text in cases:
        ways = (lambda f: f, tf.function, lambda f: tf.function(f, jit_compile=True))
        for way in ways[error is Interrupted:]:
            bridge = Bridge(put, wait)
            try:
                way(lambda xs, bridge=bridge: bridge.exchange(xs))(xs)
            except tf.errors.OpError as raised:
                # XLA raises the same class for all errors.
                assert isinstance(raised, (tf_error, tf.errors.InternalError)), type(raised)
                assert text in str(raised), raised
            else:
                raise AssertionError("no error")
            assert type(bridge.failure) is error and str(bridge.failure) in text

    for error in (Interrupted, KeyboardInterrupt):      # in eager mode they pass: a signal handler may raise them
        def interrupted(error=error):
            raise error

        bridge = Bridge(fine, interrupted)
        with pytest.raises(error):
            bridge.exchange(xs)
        assert bridge.failure is None

    state = {"fail": True}

    def sometimes():
        if state["fail"]:
            raise ValueError("now")

    bridge = Bridge(fine, sometimes)
    step = tf.function(lambda xs: bridge.exchange(xs))
    try:
        step(xs)
    except tf.errors.InvalidArgumentError:
        state["fail"] = False
    step(xs)
    assert bridge.failure is None

    assert bridge.exchange([]) == []


def test_exceptions_of_python_end_the_step(run_ranks):
    run_ranks(1, failures)


def failures_of_another_job():
    """An unhandled error of a job does not reach the next job; an error of several bridges is reported once."""
    import pytest
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd
    from bagua_hvd.core.exceptions import HorovodInternalError
    from bagua_hvd.tensorflow.bridge import Bridge, take_interruption

    def lost():
        raise HorovodInternalError("lost")

    def fail():
        for bridge in bridges:
            with pytest.raises(tf.errors.OpError, match="lost"):
                bridge.exchange([tf.constant(1.0)])

    hvd.init()
    bridges = [Bridge(lambda *_: None, lost) for _ in range(2)]
    fail()
    assert str(take_interruption()) == "lost" and take_interruption() is None
    fail()
    hvd.shutdown()
    hvd.init()
    assert take_interruption() is None


def test_failures_of_another_job(run_ranks):
    run_ranks(1, failures_of_another_job)


def bridge_is_dropped():
    """A graph keeps the bridges that it was traced with; its GraphDef, imported into another graph, does not."""
    import gc

    import tensorflow as tf

    from bagua_hvd.tensorflow.bridge import Bridge

    v1 = tf.compat.v1

    def trace():
        bridge = Bridge(lambda index, view: None, lambda: None)
        with tf.Graph().as_default() as graph:
            tf.identity(bridge.exchange([tf.ones([2])])[0], name="direct")
            within = tf.cond(v1.placeholder_with_default(True, ()), lambda: bridge.exchange([tf.ones([2])])[0],
                             lambda: tf.zeros([2]))
            tf.identity(within, name="within")
        return graph

    def run(graph):
        gc.collect()
        with v1.Session(graph=graph) as session:
            return session.run(["direct:0", "within:0"])

    graph = trace()
    assert [value.tolist() for value in run(graph)] == [[1, 1], [1, 1]]
    text, graph = graph.as_graph_def(), None
    with tf.Graph().as_default() as copy:
        tf.import_graph_def(text, name="")
    try:
        run(copy)
    except tf.errors.FailedPreconditionError as error:
        assert "has been deleted" in str(error)
    else:
        raise AssertionError("no error")


def test_graph_that_outlives_who_made_its_bridge(run_ranks):
    run_ranks(1, bridge_is_dropped)


def memory_outlives_the_step():
    import gc

    import numpy as np
    import tensorflow as tf

    from bagua_hvd.core import native
    from bagua_hvd.tensorflow.bridge import Bridge

    kept = []

    def put(index, view):
        kept.append(view)
        raise ValueError("given up")

    for compiled in (False, True):
        bridge = Bridge(put, lambda: None)
        step = tf.function(lambda x, bridge=bridge: bridge.exchange([x * 2.0]), jit_compile=compiled)
        for value in range(5):
            try:
                step(tf.fill([1000], float(value)))
            except tf.errors.OpError:
                pass
    gc.collect()
    for i, view in enumerate(kept):
        address = native.ffi.cast("float *", view.src)
        values = np.frombuffer(native.ffi.buffer(address, 4000), np.float32)
        np.testing.assert_array_equal(values, np.full(1000, 2.0 * (i % 5), np.float32))


def test_memory_lives_as_long_as_its_owner(run_ranks):
    run_ranks(1, memory_outlives_the_step)


def an_index_is_missing():
    import tensorflow as tf

    from bagua_hvd.tensorflow.bridge import Bridge

    bridge = Bridge(lambda index, view: None, lambda: None)
    for indices in ([], [0], [0, 1, 2]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="indices: expected one for each tensor"):
            bridge.exchange([tf.zeros(2), tf.zeros(3)], indices=indices)
    assert len(bridge.exchange([tf.zeros(2), tf.zeros(3)])) == 2


def test_an_index_is_missing(run_ranks):
    run_ranks(1, an_index_is_missing)
