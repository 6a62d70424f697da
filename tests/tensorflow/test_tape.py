"""DistributedGradientTape and the optimizers of tf.compat.v1: eager, in tf.function, compiled by XLA.

Expected values are computed from all ranks' data, by plain TensorFlow in eager mode.
"""
import functools
import gc
import os
import signal
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import bagua_hvd.tensorflow as hvd
from bagua_hvd.algorithms import ByteGrad
from bagua_hvd.tensorflow.reduction import shared_reductions
from memory import resident_nbytes

MODES = {
    "eager": lambda function: function, "graph": tf.function, "xla": tf.function(jit_compile=True),
}
SUBSET = hvd.ProcessSet([0, 1])


class Net(tf.Module):
    """Two layers, and one variable that no loss depends on."""

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(0)
        self.w1, self.w2 = (tf.Variable(random.normal(size=shape), dtype=tf.float32) for shape in ((6, 8), (8, 3)))
        self.unused = tf.Variable(1.0)
        self.b1 = tf.Variable(tf.zeros(8))

    @property
    def variables_in_order(self):
        return [self.w1, self.b1, self.w2, self.unused]

    def loss(self, batch):
        return tf.reduce_mean(tf.square(tf.tanh(batch @ self.w1 + self.b1) @ self.w2))


def batch_of(rank, step=0, rows=5):
    return tf.constant(np.random.default_rng(100 * step + rank).normal(size=(rows, 6)), tf.float32)


def gradients_alone(net, batch):
    with tf.GradientTape() as tape:
        loss = net.loss(batch)
    return tape.gradient(loss, net.variables_in_order)


def expected_gradients(net, ranks, **arguments):
    """The mean of the gradients of the ranks' batches."""
    lists = [gradients_alone(net, batch_of(rank, **arguments)) for rank in ranks]
    return [None if entries[0] is None else sum(entries) / len(lists) for entries in zip(*lists, strict=True)]


def assert_near(actual, expected, algorithm="gradient_allreduce"):
    # A level of bytegrad depends on the range of its chunk, and the contents of chunks on the first step.
    largest = max(np.abs(e).max() for e in expected if e is not None)
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if e is not None:
            exact = algorithm == "gradient_allreduce"
            tolerance = {"rtol": 1e-4, "atol": 1e-6} if exact else {"rtol": 0, "atol": largest / 60}
            np.testing.assert_allclose(a, e, **tolerance)


def assert_same_everywhere(tensors):
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors if tensor is not None], 0)
    everyone = hvd.allgather(flat[None])
    assert np.isfinite(flat).all() and (everyone.numpy() == everyone.numpy()[0]).all()


def training(mode):
    for algorithm in ("gradient_allreduce", "bytegrad"):
        net = Net()

        def step(batch, net=net, algorithm=algorithm):
            with tf.GradientTape() as tape:
                loss = net.loss(batch)
            tape = hvd.DistributedGradientTape(tape, algorithm=algorithm)
            assert type(tape).__name__ == "GradientTape" and isinstance(tape, tf.GradientTape)
            gradients = tape.gradient(loss, net.variables_in_order)
            for gradient, variable in zip(gradients, net.variables_in_order, strict=True):
                if gradient is not None:
                    variable.assign_sub(0.1 * gradient)
            return gradients

        step = MODES[mode](step)
        for number, rows in enumerate((5, 5, 4)):        # the last shape causes another trace
            expected = expected_gradients(net, range(hvd.size()), step=number, rows=rows)
            assert_near(step(batch_of(hvd.rank(), number, rows)), expected, algorithm)
        assert_same_everywhere(net.variables_in_order)


def options(mode):
    net = Net()
    variables = net.variables_in_order
    mean = expected_gradients(net, range(hvd.size()))

    def reduced(**arguments):
        def gradients(batch):
            with hvd.DistributedGradientTape(tf.GradientTape(), **arguments) as tape:
                loss = net.loss(batch)
            return tape.gradient(loss, {"first": variables[:2], "rest": tuple(variables[2:])})

        result = MODES[mode](gradients)(batch_of(hvd.rank()))
        return [*result["first"], *result["rest"]]

    assert_near(reduced(groups=2), mean)
    assert_near(reduced(groups=[variables[1:3]]), mean)
    assert_near(reduced(gradient_predivide_factor=3.0), mean)
    assert_near(reduced(op=hvd.Sum), [None if m is None else m * hvd.size() for m in mean])
    assert_near(reduced(compression=hvd.Compression.fp16), mean, "as far as float16 goes")
    assert_near(reduced(algorithm=ByteGrad(error_feedback=True)), mean, "bytegrad")
    if hvd.size() == 3:
        mine = [0, 1] if SUBSET.included() else [hvd.rank()]
        assert_near(reduced(process_set=SUBSET), expected_gradients(net, mine))
    else:
        a, b = (gradients_alone(net, batch_of(rank)) for rank in (0, 1))
        adasum = [
            None if x is None else (1 - np.vdot(x, y) / (2 * np.vdot(x, x))) * x
            + (1 - np.vdot(x, y) / (2 * np.vdot(y, y))) * y for x, y in zip(a, b, strict=True)
        ]
        assert_near(reduced(op=hvd.Adasum), adasum)

    # Local sources keep this rank's gradient, divided by the number of ranks or not.
    layer = SimpleNamespace(trainable_weights=[net.b1])
    for scale in (True, False):
        def local(batch, scale=scale):
            with tf.GradientTape() as tape:
                loss = net.loss(batch)
            if scale:
                tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
            else:
                tape = hvd.DistributedGradientTape(tape, scale_local_gradients=False)
                tape.register_local_source(net.b1)
            return tape.gradient(loss, variables)

        own = gradients_alone(net, batch_of(hvd.rank()))[1] / (hvd.size() if scale else 1)
        assert_near(MODES[mode](local)(batch_of(hvd.rank())), [mean[0], own, *mean[2:]])

    for wrong in ({"groups": -1}, {"groups": [variables[0]]}, {"groups": [[variables[0]], [variables[0]]]},
                  {"algorithm": "bytgrad"}, {"op": 9}, {"gradient_predivide_factor": 2.0, "op": hvd.Sum}):
        with pytest.raises(ValueError):
            reduced(**wrong)


def sparse(mode):
    """Rows are gathered, also different numbers of rows; in XLA, or on request, they are sent dense."""
    table = tf.Variable(tf.reshape(tf.range(14, dtype=tf.float32), (7, 2)))
    rows = tf.constant([[1, 1, 2], [0], [3, 5]][hvd.rank()])

    def loss(rows):
        return tf.reduce_sum(tf.square(tf.gather(table, rows)))

    def gradients(rows, **arguments):
        with tf.GradientTape() as tape:
            value = loss(rows)
        return hvd.DistributedGradientTape(tape, **arguments).gradient(value, [table])[0]

    expected = np.zeros((7, 2), np.float32)
    for row in np.concatenate([[1, 1, 2], [0], [3, 5]][:hvd.size()]):
        expected[row] += 2 * table.numpy()[row] / hvd.size()
    gathered = MODES[mode](gradients)(rows)
    assert isinstance(gathered, tf.IndexedSlices) == (mode != "xla")
    np.testing.assert_allclose(tf.convert_to_tensor(gathered), expected, rtol=1e-5)
    dense = MODES[mode](lambda rows: gradients(rows, sparse_as_dense=True))(rows)
    assert not isinstance(dense, tf.IndexedSlices)
    np.testing.assert_allclose(dense, expected, rtol=1e-5)

    def local(rows):
        with tf.GradientTape() as tape:
            value = loss(rows)
        tape = hvd.DistributedGradientTape(tape)
        tape.register_local_source(table)
        return tape.gradient(value, [table])[0]

    own = np.zeros((7, 2), np.float32)
    for row in rows.numpy():
        own[row] += 2 * table.numpy()[row] / hvd.size()
    np.testing.assert_allclose(tf.convert_to_tensor(MODES[mode](local)(rows)), own, rtol=1e-5)


def jacobians(mode):
    """Means of the ranks' Jacobian matrices; the tape's other methods stay local."""
    weight, bias, unused = tf.Variable([1.0, 2.0]), tf.Variable(3.0), tf.Variable(4.0)
    ranks = tf.range(hvd.size(), dtype=tf.float32) + 1.0

    def both(batch, **how):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(batch)
            y = weight * weight * (hvd.rank() + 1.0) + bias
            z = tf.square(batch) * (hvd.rank() + 1.0)
        tape = hvd.DistributedGradientTape(tape)
        tape.register_local_source(bias)
        of_variables = tape.jacobian(y, {"weight": weight, "rest": [bias, unused]}, **how)
        return of_variables, tape.batch_jacobian(z, batch, **how), tape.gradient(y, weight)

    batch = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    mean = tf.reduce_mean(ranks)
    for how in ({}, {"experimental_use_pfor": False}):
        matrices, by_example, gradient = MODES[mode](functools.partial(both, **how))(batch)
        np.testing.assert_allclose(matrices["weight"], np.diag([2.0, 4.0]) * mean, rtol=1e-6)
        np.testing.assert_allclose(matrices["rest"][0], np.full(2, 1 / hvd.size()), rtol=1e-6)
        assert matrices["rest"][1] is None
        np.testing.assert_allclose(by_example, [np.diag(2.0 * row) * mean for row in batch.numpy()], rtol=1e-6)
        np.testing.assert_allclose(gradient, 2 * weight * mean, rtol=1e-6)

    def once():
        with tf.GradientTape() as tape:
            y = weight * weight * (hvd.rank() + 1.0)
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).jacobian(y, weight)

    np.testing.assert_allclose(MODES[mode](once)(), np.diag([2.0, 4.0]) * tf.reduce_sum(ranks), rtol=1e-6)


def wrapped_while_it_records(mode):
    """Either tape may end the recording, and both stop."""
    weight = tf.Variable(1.0)

    def gradient_after():
        with tf.GradientTape() as tape:
            loss = weight * (hvd.rank() + 1.0)
            tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(loss, weight)

    def gradient_within():
        with tf.GradientTape() as tape:
            loss = weight * (hvd.rank() + 1.0)
            gradient = hvd.DistributedGradientTape(tape).gradient(loss, weight)
        with pytest.raises(RuntimeError, match="only be used to"):
            tape.gradient(loss, weight)
        return gradient

    for gradient in (gradient_after, gradient_within):
        np.testing.assert_allclose(MODES[mode](gradient)(), (hvd.size() + 1) / 2)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tf.GradientTape()))


def second_order(mode):
    """A penalty on the reduced gradients is differentiated through the average, which includes the other ranks."""
    weight, scale = tf.Variable([1.0, 2.0]), hvd.rank() + 1.0

    def gradient(**arguments):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = scale * tf.reduce_sum(weight ** 3)
            (first,) = hvd.DistributedGradientTape(inner, **arguments).gradient(loss, [weight])
            penalty = tf.reduce_sum(first ** 2)
        return outer.gradient(penalty, weight)

    mean = (hvd.size() + 1) / 2
    for op, factor in ((hvd.Average, mean * scale), (hvd.Sum, mean * scale * hvd.size() ** 2)):
        # first = 3 mean w^2; the gradient with respect to it is 2 first on all ranks, which 6 scale w multiplies
        result = MODES[mode](functools.partial(gradient, op=op))()
        np.testing.assert_allclose(result, factor * 36 * weight ** 3, rtol=1e-6)
    for arguments, named in (({"algorithm": "bytegrad"}, "ByteGrad"), ({"delay": 1}, "delay=1")):
        with pytest.raises(NotImplementedError, match=f"{named} cannot be differentiated again"):
            MODES[mode](functools.partial(gradient, **arguments))()


CELLS = (training, options, sparse, jacobians, wrapped_while_it_records, second_order)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.timeout(260)
def test_tape(run_ranks, mode, n):
    run_ranks(n, run_tape, arguments={"mode": mode}, timeout=240)


def run_tape(mode):
    size = int(os.environ["HOROVOD_SIZE"])
    hvd.init(process_sets=[SUBSET] if size == 3 else None)      # with two ranks it would be the global set
    for cell in CELLS:
        print(cell.__name__, flush=True)
        cell(mode)


# ------------------------------------------------------------------------------------------------- tf.compat.v1 ----


def optimizers_v1():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    v1 = tf.compat.v1

    # In a graph with a session; two passes per step.
    for passes, average in ((1, False), (2, False), (2, True)):
        with tf.Graph().as_default():
            weight = v1.get_variable("w", initializer=tf.ones((3,)), use_resource=True)
            factor = v1.placeholder(tf.float32, ())
            steps = v1.train.get_or_create_global_step()
            opt = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(0.5, 0.9), backward_passes_per_step=passes,
                                           average_aggregated_gradients=average)
            train = opt.minimize(factor * tf.reduce_sum(weight), global_step=steps)
            broadcast = hvd.broadcast_global_variables(0)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                session.run(broadcast)
                for number in range(passes):
                    np.testing.assert_array_equal(session.run(weight), np.ones(3))
                    session.run(train, {factor: rank + 1.0 + number})
                mean = sum(np.mean(np.arange(size) + 1.0 + number) for number in range(passes))
                expected = 1 - 0.5 * mean / (passes if average else 1)
                np.testing.assert_allclose(session.run(weight), np.full(3, expected), rtol=1e-6)
                assert session.run(steps) == passes
                by_place = opt.apply_gradients(opt.compute_gradients(tf.reduce_sum(weight)), steps)
                session.run(v1.global_variables_initializer())
                for _ in range(passes):
                    session.run(by_place)
                assert session.run(steps) == passes
                assert opt.get_slot_names() == ["momentum"]

    # In eager mode, and Adasum's delta optimizer: equal steps are averaged, orthogonal ones added.
    weight = tf.Variable(tf.ones((3,)))
    opt = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5))
    opt.minimize(lambda: (rank + 1.0) * tf.reduce_sum(weight), var_list=[weight])
    np.testing.assert_allclose(weight, np.full(3, 1 - 0.5 * np.mean(np.arange(size) + 1.0)), rtol=1e-6)
    with pytest.raises(ValueError, match="eager"):
        hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), backward_passes_per_step=2)
    for direction, expected in ((tf.one_hot(0, 2), [0.5, 1.0]), (tf.one_hot(rank, 2), [0.5, 0.5])):
        weight = tf.Variable(tf.ones((2,)))
        opt = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum)
        opt.minimize(lambda d=direction, w=weight: tf.reduce_sum(d * w), var_list=[weight])
        np.testing.assert_allclose(weight, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="Adasum"):
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), op=hvd.Adasum)
    with pytest.raises(ValueError, match="keras"):
        hvd.DistributedOptimizer("sgd")


def test_optimizers_v1(run_ranks):
    run_ranks(2, optimizers_v1, timeout=110)


def weights_v1():
    """A graph takes the weight of each step from a placeholder."""
    hvd.init()
    rank, v1 = hvd.rank(), tf.compat.v1
    with tf.Graph().as_default():
        weight = v1.get_variable("w", initializer=tf.ones((3,)), use_resource=True)
        samples = v1.placeholder(tf.float32, ())
        opt = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        opt.set_weight(samples)
        train = opt.minimize((rank + 1.0) * tf.reduce_sum(weight))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            expected = 1.0
            for counts in ((4, 1, 7), (0, 3, 1)):
                session.run(train, {samples: counts[rank]})
                expected -= np.average([1, 2, 3], weights=counts)
                np.testing.assert_allclose(session.run(weight), np.full(3, expected), rtol=1e-6)
    weight = tf.Variable(1.0)
    opt = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
    opt.set_weight(rank)
    opt.minimize(lambda: (rank + 1.0) * weight, var_list=[weight])
    np.testing.assert_allclose(weight, 1 - 8 / 3, rtol=1e-6)


def test_weights_v1(run_ranks):
    run_ranks(3, weights_v1, timeout=110)


def adasum_on_three_ranks():
    hvd.init()
    with pytest.raises(ValueError, match="Keras"):
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match="power of 2"):
        hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum)


def test_adasum_on_three_ranks(run_ranks):
    run_ranks(3, adasum_on_three_ranks)


def adasum_in_a_graph(without):
    """Resource variables and reference variables, initialized with the rest or before the optimizer exists."""
    v1 = tf.compat.v1
    getattr(v1, without)()
    hvd.init()
    rank = hvd.rank()
    for before in (False, True):
        with tf.Graph().as_default(), v1.Session() as session:
            weight = v1.Variable(tf.random.uniform((2,), seed=1))
            if before:
                session.run(weight.initializer)
            opt = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum)
            train = opt.minimize(tf.reduce_sum(tf.one_hot(rank, 2) * weight))
            rest = [each for each in v1.global_variables() if not before or each is not weight]
            session.run(v1.variables_initializer(rest))
            begin = session.run(weight).copy()
            for number in (1, 2):
                session.run(train)
                np.testing.assert_allclose(session.run(weight), begin - 0.5 * number, rtol=1e-6)
    # Two passes per step, which starts from the weights at the window's begin, also after a broadcast.
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.Variable(tf.fill((2,), float(rank)))
        opt = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum,
                                       backward_passes_per_step=2)
        train = opt.minimize(tf.reduce_sum(tf.one_hot(rank, 2) * weight))
        session.run(v1.global_variables_initializer())
        session.run(hvd.broadcast_variables([weight], 1))
        for number in range(1, 5):
            session.run(train)
            if number % 2 == 0:
                np.testing.assert_allclose(session.run(weight), [1 - 0.5 * number] * 2, rtol=1e-6)


@pytest.mark.parametrize("without", ["disable_eager_execution", "disable_v2_behavior"])
def test_adasum_in_a_graph(run_ranks, without):
    run_ranks(2, adasum_in_a_graph, arguments={"without": without}, timeout=110)


# ---------------------------------------------------------------------------------------------------- processes ----


def many_steps():
    """Memory does not grow: a step leaves nothing behind."""
    hvd.init()
    weight = tf.Variable(tf.ones((64, 64)))

    @tf.function
    def steps(count):
        for _ in tf.range(count):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(weight))
            weight.assign_sub(1e-3 * hvd.DistributedGradientTape(tape).gradient(loss, [weight])[0])

    steps(tf.constant(2000))
    gc.collect()
    before = resident_nbytes()
    steps(tf.constant(10_000))
    gc.collect()
    # A leak of 16 KiB per step would be 160 MiB.
    assert resident_nbytes() - before < 16 << 20
    assert_same_everywhere([weight])


@pytest.mark.timeout(260)
def test_many_steps(run_ranks):
    run_ranks(2, many_steps, timeout=240)


def groups_of_variables_that_die():
    """A tape keeps nothing for deleted variables of its groups; functions that use others of them continue to work."""
    hvd.init()
    before = len(shared_reductions._reductions)

    def make(names):
        return [tf.Variable(1.0, name=name) for name in names]

    def gradients(variables, groups):
        with tf.GradientTape() as tape:
            loss = tf.add_n([each * (hvd.rank() + 1.0) for each in variables])
        return hvd.DistributedGradientTape(tape, groups=groups).gradient(loss, variables)

    mean = (hvd.size() + 1) / 2
    for _ in range(3):
        a, b, c = make("abc")
        step = tf.function(lambda a=a, b=b, c=c: gradients([a, b], [[a, c], [b]]))
        np.testing.assert_allclose(step(), [mean, mean])
        np.testing.assert_allclose(gradients([a, b, c], [[a, c], [b]]), [mean] * 3)
        assert len(shared_reductions._reductions) == before + 1
        references = [weakref.ref(each) for each in (a, b, c)]
        del a, b, c, step
        gc.collect()
        assert not any(reference() is not None for reference in references)
        assert len(shared_reductions._reductions) == before

    a, b = make("ab")
    step = tf.function(lambda: gradients([a], [[a, b]]))
    step = step.get_concrete_function()
    b = None
    gc.collect()
    np.testing.assert_allclose(step(), [mean])
    for _ in range(3):          # possibly at the address of a deleted one
        (b,) = make("b")
        np.testing.assert_allclose(gradients([a, b], [[a, b]]), [mean, mean])
        b = None


def test_groups_of_variables_that_die(run_ranks):
    run_ranks(2, groups_of_variables_that_die)


def where_another_lay(use, *arguments):
    """A new variable at the address of a deleted one, for which use() had been called."""
    gone = set()
    for variable in [tf.Variable(1.0) for _ in range(300)]:
        use(variable)
        gone.add(id(variable))
    variable = None
    gc.collect()
    others = []
    while len(others) < 5000:
        others.append(tf.Variable(*arguments))
        if id(others[-1]) in gone:
            return others.pop()
    raise AssertionError("no variable was made where another lay")


def sources():
    tape = hvd.DistributedGradientTape(tf.GradientTape(persistent=True), scale_local_gradients=False)
    variable = where_another_lay(tape.register_local_source, 1.0)
    with tape:
        loss = variable * float(hvd.rank())
    assert tape.gradient(loss, variable) == (hvd.size() - 1) / 2
    assert tape.get_local_and_global_gradients(loss, [variable])[0] == []


def variables_of_optimizers():
    for plain in (tf.compat.v1.train.GradientDescentOptimizer(1.0), tf.keras.optimizers.SGD(1.0)):
        optimizer = hvd.DistributedOptimizer(plain, scale_local_gradients=False)
        variable = where_another_lay(optimizer.register_local_var, 1.0)
        optimizer.apply_gradients(reduced_first(optimizer, tf.constant(float(hvd.rank())), variable))
        assert variable == 1.0 - (hvd.size() - 1) / 2


def sums_of_gradients():
    helper = hvd.LocalGradientAggregationHelperEager(1, lambda gradients, _: gradients, False, False)
    variable = where_another_lay(lambda each: helper.compute_gradients([tf.constant(1.0)], [each]), [10.0, 10.0])
    np.testing.assert_array_equal(helper.compute_gradients([tf.constant([1.0, 2.0])], [variable])[0], [1.0, 2.0])


def aggregated_variables():
    helper = hvd.LocalGradientAggregationHelperEager(1, lambda gradients, _: gradients, False, False)
    variable = where_another_lay(helper.register_local_var, 1.0)
    assert helper.compute_gradients([tf.constant(1.0)], [variable])[0] == 1.0


def starts_of_adasum():
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), op=hvd.Adasum)
    variable = where_another_lay(lambda each: optimizer.apply_gradients([(tf.constant(1.0), each)]), [10.0, 10.0])
    optimizer.apply_gradients([(tf.constant([1.0, 1.0]), variable)])
    np.testing.assert_allclose(variable, [9.0, 9.0])
    # A step begins with the broadcast weights.
    variable = tf.Variable(float(hvd.rank()))
    optimizer.apply_gradients([(tf.constant(1.0), variable)])
    hvd.broadcast_variables([variable, *optimizer.variables()], 1)
    optimizer.apply_gradients([(tf.constant(1.0), variable)])
    assert variable == -1.0


KEPT_BY_VARIABLE = {part.__name__: part for part in (
    sources, variables_of_optimizers, sums_of_gradients, aggregated_variables, starts_of_adasum)}


def reduced_first(optimizer, gradient, variable):
    """Pairs for apply_gradients(); optimizers of tf.compat.v1 reduce them in compute_gradients()."""
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return optimizer.compute_gradients(lambda: variable * gradient, [variable])
    return [(gradient, variable)]


def variables_where_others_lay(what):
    """State for a deleted variable is not used for a new one at the same address."""
    hvd.init()
    KEPT_BY_VARIABLE[what]()


@pytest.mark.parametrize("what", KEPT_BY_VARIABLE)
def test_variables_where_others_lay(run_ranks, what):
    run_ranks(2, variables_where_others_lay, arguments={"what": what})


def lose_a_rank(mode):
    hvd.init()
    net = Net()

    @MODES[mode]
    def step(batch):
        with tf.GradientTape() as tape:
            loss = net.loss(batch)
        return hvd.DistributedGradientTape(tape).gradient(loss, net.variables_in_order)

    @hvd.elastic.run
    def train(state):
        for number in range(100_000):
            if hvd.rank() == 1 and number == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                step(batch_of(hvd.rank()))
            except tf.errors.OpError as error:
                assert "rank 1 " in str(error), error
                raise

    class State:
        """Only the methods that run() calls; what follows the failure is not tested here."""
        def sync(self):
            pass

        def restore(self):
            print("restored", flush=True)
            os._exit(0)

        def on_hosts_updated(self, timestamp, result):
            pass

    train(State())
    raise AssertionError("no error")


@pytest.mark.parametrize("mode", list(MODES))
def test_lost_rank(run_ranks, mode):
    """The error names the rank; elastic.run() treats it as HorovodInternalError, and restores."""
    results = run_ranks(2, lose_a_rank, arguments={"mode": mode}, check=False, timeout=100)
    assert results[1].returncode == -signal.SIGKILL
    assert results[0].returncode == 0 and "restored" in results[0].output, results[0].output


def both_frameworks():
    """Torch and TensorFlow in one process, with interleaved steps."""
    import torch

    import bagua_hvd.torch as hvd_torch

    hvd.init()
    net = Net()
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    opt = hvd_torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for number in range(3):
        with tf.GradientTape() as tape:
            loss = net.loss(batch_of(hvd.rank(), number))
        tape = hvd.DistributedGradientTape(tape)
        opt.zero_grad()
        model(torch.tensor(batch_of(hvd.rank(), number).numpy())).square().mean().backward()
        expected = expected_gradients(net, range(hvd.size()), step=number)
        gradients = tape.gradient(loss, net.variables_in_order)
        assert_near(gradients, expected)
        opt.step()
        for gradient, variable in zip(gradients, net.variables_in_order, strict=True):
            if gradient is not None:
                variable.assign_sub(0.1 * gradient)
    assert_same_everywhere(net.variables_in_order)
    assert_same_everywhere([tf.constant(parameter.detach().numpy()) for parameter in model.parameters()])


def test_both_frameworks(run_ranks):
    pytest.importorskip("torch")        # .ci/versions installs one framework only
    run_ranks(2, both_frameworks, timeout=110)
