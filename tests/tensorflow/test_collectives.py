"""Every collective and dtype, eager, in graphs and compiled; expected values from NumPy."""
import pytest

REDUCED = ["uint8", "int8", "int32", "int64", "float16", "float32", "float64", "bfloat16"]
SCATTERED = ["int32", "int64", "float16", "float32", "float64", "bfloat16"]
# The average of integer IndexedSlices has the dtype of TensorFlow's `/`, as in Horovod. Commit 6a5060e had decided for
# their own dtype, truncated, as for dense tensors.
DIVIDED = {"uint8": "float32", "int8": "float32", "uint16": "float32", "int16": "float32", "int32": "float64",
           "int64": "float64"}
MOVED = ["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool", "bfloat16",
         "uint32", "uint64", "complex64", "float8_e4m3fn"]


def values():
    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    ways = {"eager": lambda f: f, "graph": tf.function, "xla": lambda f: tf.function(f, jit_compile=True)}
    base = np.arange(2 * size * 3).reshape(2 * size, 3) % 5
    total = size * base + sum(range(size))
    root = size - 1

    def of(other, dtype):
        """The input of rank `other`, for TensorFlow and for NumPy: bool is 0 and 1."""
        tensor = tf.cast(tf.cast(base + other, tf.float32), dtype)
        return tensor, np.asarray(tf.cast(tensor, tf.float64))

    def check(actual, expected, dtype):
        assert actual.dtype == dtype
        np.testing.assert_array_equal(tf.cast(actual, tf.float64), expected)

    def everywhere(inputs):
        """The collectives that XLA can compile, too."""
        x = inputs["float32"]
        return {
            "sum": {dtype: hvd.allreduce(inputs[dtype], op=hvd.Sum) for dtype in REDUCED},
            "max": {dtype: hvd.allreduce(inputs[dtype], op=hvd.Max) for dtype in REDUCED},
            "min": {dtype: hvd.allreduce(inputs[dtype], op=hvd.Min) for dtype in REDUCED},
            "product": hvd.allreduce(x, op=hvd.Product),
            "average": hvd.allreduce(x, prescale_factor=2.0, postscale_factor=0.5),
            # Integers: scaled in float64, truncated towards zero.
            "truncated": hvd.allreduce(tf.constant([-3 - rank, 3 + rank])),
            "grouped": dict(zip(REDUCED, hvd.grouped_allreduce([inputs[dtype] for dtype in REDUCED], op=hvd.Sum),
                                strict=True)),
            "broadcast": {dtype: hvd.broadcast(inputs[dtype], root) for dtype in MOVED},
            "reducescatter": {dtype: hvd.reducescatter(inputs[dtype], op=hvd.Sum) for dtype in SCATTERED},
            "numbers": [hvd.size_op(), hvd.rank_op(), hvd.local_size_op(), hvd.local_rank_op(),
                        hvd.process_set_included_op(), hvd.process_set_included_op(77)],
            "empty": hvd.allreduce(x[:0]),
            "compressed": hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16),
        }

    def check_everywhere(results):
        for dtype in REDUCED:
            check(results["sum"][dtype], total, dtype)
            check(results["grouped"][dtype], total, dtype)
            check(results["max"][dtype], base + size - 1, dtype)
            check(results["min"][dtype], base, dtype)
        check(results["product"], np.prod([base + other for other in range(size)], axis=0), "float32")
        np.testing.assert_allclose(results["average"], total / size, rtol=1e-6)
        check(results["truncated"], np.trunc(np.array([-1, 1]) * sum(3 + r for r in range(size)) / size), "int32")
        for dtype in MOVED:
            check(results["broadcast"][dtype], of(root, dtype)[1], dtype)
        for dtype in SCATTERED:
            check(results["reducescatter"][dtype], total[2 * rank:2 * rank + 2], dtype)
        assert [int(number) for number in results["numbers"]] == [size, rank, size, rank, 1, -3]
        assert results["empty"].shape == (0, 3)
        check(results["compressed"], total, "float32")

    def not_compiled(inputs):
        """The collectives whose results have a shape that is known only at run time."""
        x = inputs["float32"]
        return {
            # Each rank has one row more than the previous rank; rank 0 has none.
            "allgather": {dtype: hvd.allgather(inputs[dtype][:rank]) for dtype in MOVED},
            "alltoall": {dtype: hvd.alltoall(inputs[dtype]) for dtype in MOVED},
            # Rank r sends one row to every rank, rank 0 none; the remaining rows are dropped.
            "uneven": hvd.alltoall(x, splits=[tf.constant(1 if rank else 0), *[1 if rank else 0] * (size - 1)]),
            "grouped_allgather": hvd.grouped_allgather([x, x[:1] * 2.0]),
            "grouped_reducescatter": hvd.grouped_reducescatter([x, x[:1]], op=hvd.Sum),
            "sparse_integers": {
                dtype: [hvd.allreduce(tf.IndexedSlices(tf.constant([[5, 7]], dtype), tf.constant([rank])), op=op)
                        for op in (hvd.Average, hvd.Sum)] for dtype in DIVIDED
            },
            "sparse": hvd.grouped_allreduce([x, tf.IndexedSlices(x, tf.range(rank, rank + 2 * size), None)]),
        }

    def check_not_compiled(results):
        ranks = range(size)
        for dtype in MOVED:
            check(results["allgather"][dtype], np.concatenate([of(r, dtype)[1][:r] for r in ranks]), dtype)
            check(results["alltoall"][dtype],
                  np.concatenate([of(r, dtype)[1][2 * rank:2 * rank + 2] for r in ranks]), dtype)
        output, received = results["uneven"]
        check(received, [1 if other else 0 for other in ranks], "int32")
        check(output, np.concatenate([np.zeros((0, 3))] + [(base + r)[rank:rank + 1] for r in ranks if r]), "float32")
        first, second = results["grouped_allgather"]
        check(first, np.concatenate([base + r for r in ranks]), "float32")
        check(second, np.concatenate([2 * (base + r)[:1] for r in ranks]), "float32")
        first, second = results["grouped_reducescatter"]
        check(first, total[2 * rank:2 * rank + 2], "float32")
        check(second, total[:1] if rank == 0 else np.zeros((0, 3)), "float32")
        for dtype, (average, plain_sum) in results["sparse_integers"].items():
            quotients = np.array([5, 7], DIVIDED[dtype]) / np.array(size, DIVIDED[dtype])
            check(average.values, np.tile(quotients, (size, 1)), DIVIDED[dtype])
            check(plain_sum.values, np.tile([5, 7], (size, 1)), dtype)
        dense, sparse = results["sparse"]
        np.testing.assert_allclose(dense, total / size, rtol=1e-6)
        check(sparse.indices, np.concatenate([np.arange(r, r + 2 * size) for r in ranks]), "int32")
        np.testing.assert_allclose(sparse.values, np.concatenate([(base + r) / size for r in ranks]), rtol=1e-6)

    inputs = {dtype: of(rank, dtype)[0] for dtype in MOVED}
    for make in ways.values():
        check_everywhere(make(everywhere)(inputs))
    for make in (ways["eager"], ways["graph"]):
        check_not_compiled(make(not_compiled)(inputs))
        make(lambda: [hvd.barrier()] and None)()
        assert 0 <= int(make(hvd.join)()) < size
    assert hvd.grouped_allreduce([]) == []


@pytest.mark.parametrize("n", [1, 2, 3])
def test_values(run_ranks, n):
    run_ranks(n, values, timeout=110)


def inputs_left_alone():
    """In a graph an op writes into its input's memory only if no other op uses it."""
    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()
    mine = np.full(3, float(hvd.rank()))
    x, variable = tf.constant(mine), tf.Variable(mine)

    @tf.function
    def step(x):
        y = x * 2.0
        return y, hvd.allreduce(y, op=hvd.Sum), hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(variable, op=hvd.Sum)

    for _ in range(3):
        doubled, *totals = step(x)
        np.testing.assert_array_equal(doubled, 2 * mine)
        np.testing.assert_array_equal(totals, [[2.0] * 3, [1.0] * 3, [1.0] * 3])
        np.testing.assert_array_equal(x, mine)
        np.testing.assert_array_equal(variable, mine)
    swapped = np.arange(4).astype(">f4")        # a NumPy array in the other byte order
    np.testing.assert_array_equal(hvd.allreduce(swapped, op=hvd.Sum), 2 * swapped)
    np.testing.assert_array_equal(tf.function(lambda: hvd.allgather(swapped))(), [*swapped, *swapped])


def test_inputs_are_left_alone(run_ranks):
    run_ranks(2, inputs_left_alone)


def gradients():
    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    x = tf.reshape(tf.range(2.0 * size * 2), [2 * size, 2]) + float(rank)

    every = sum(r + 1 for r in range(size))         # the sum of the ranks' weights
    average = every / size
    ones = np.ones((2 * size, 2))
    by_receiver = np.repeat(np.arange(1.0, size + 1), 2)[:, None] * ones
    rows = rank + 1

    def first_rows(count, values):
        return np.concatenate([values[:count], 0 * ones[count:]])

    # name: (function, gradient of its sum if rank r weights it by r + 1)
    everywhere = {
        "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum), every * ones),
        "average": (lambda x: hvd.allreduce(x), average * ones),
        "factors": (lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0),
                    6 * every * ones),
        "grouped": (lambda x: sum(hvd.grouped_allreduce([x, 3.0 * x], op=hvd.Sum)), 4 * every * ones),
        "broadcast": (lambda x: hvd.broadcast(x, size - 1), (rank == size - 1) * average * ones),
    }
    not_compiled = {
        # Horovod's convention: averaged, then this rank's rows. Rank r contributes r + 1 rows.
        "allgather": (lambda x: hvd.allgather(x[:rows]), first_rows(rows, average * ones)),
        "grouped_allgather": (lambda x: sum(tf.reduce_sum(y) for y in hvd.grouped_allgather([x, 2.0 * x])),
                              3 * average * ones),
        # One row to every rank, which gets the receiver's gradient; the other rows are dropped.
        "uneven": (lambda x: hvd.alltoall(x, splits=[1] * size)[0],
                   first_rows(size, np.arange(1.0, 2 * size + 1)[:, None] * ones)),
        "alltoall": (lambda x: hvd.alltoall(x), by_receiver),
        "reducescatter": (lambda x: hvd.reducescatter(x), by_receiver),
        "reducescatter_sum": (lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0),
                              2 * size * by_receiver),
        "grouped_reducescatter": (lambda x: sum(tf.reduce_sum(y) for y in hvd.grouped_reducescatter([x, x])),
                                  2 * by_receiver),
    }

    def check(cases, make):
        def compute(x):
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                totals = {name: tf.reduce_sum(case[0](x)) * float(rank + 1) for name, case in cases.items()}
            return {name: tape.gradient(value, x) for name, value in totals.items()}

        for name, actual in make(compute)(x).items():
            np.testing.assert_allclose(actual, cases[name][1], rtol=1e-6, err_msg=name)

    check(everywhere | not_compiled, lambda f: f)
    check(everywhere | not_compiled, tf.function)
    check(everywhere, lambda f: tf.function(f, jit_compile=True))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients(run_ranks, n):
    run_ranks(n, gradients, timeout=110)


def process_sets():
    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    rank = hvd.rank()
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 2]}
    for make in (lambda f: f, tf.function, lambda f: tf.function(f, jit_compile=True)):
        included = make(lambda: hvd.process_set_included_op(pair.process_set_id))()
        assert int(included) == (rank != 1)
        if rank == 1:
            continue
        assert int(make(lambda: hvd.size_op(pair.process_set_id))()) == 2
        total = make(lambda: hvd.allreduce(tf.constant([1.0 + rank]), op=hvd.Sum, process_set=pair))()
        np.testing.assert_array_equal(total, [4.0])
        root = make(lambda: hvd.broadcast(tf.constant([rank]), 2, process_set=pair))()
        np.testing.assert_array_equal(root, [2])
    if rank != 1:
        np.testing.assert_array_equal(hvd.allgather(tf.constant([rank]), process_set=pair), [0, 2])
    else:
        try:
            hvd.allreduce(tf.constant([1.0]), process_set=pair)
        except tf.errors.InvalidArgumentError as error:
            assert "Rank 1 is not a member of the provided process set" in str(error)
        else:
            raise AssertionError("a rank outside the set was let in")


def test_process_sets(run_ranks):
    run_ranks(3, process_sets)


def sessions():
    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    tf.compat.v1.disable_eager_execution()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    variable = tf.compat.v1.get_variable("v", initializer=tf.fill([2], float(rank)))
    total = hvd.allreduce(tf.constant([1.0 + rank]), op=hvd.Sum)
    gathered = hvd.allgather(tf.constant([rank]))
    gradient = tf.compat.v1.gradients(hvd.allreduce(variable, op=hvd.Sum), variable)[0]
    hook = hvd.BroadcastGlobalVariablesHook(size - 1)
    with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
        results = session.run([total, gathered, variable, gradient])
    np.testing.assert_array_equal(results[0], [size * (size + 1) / 2])
    np.testing.assert_array_equal(results[1], np.arange(size))
    np.testing.assert_array_equal(results[2], np.full(2, size - 1))
    np.testing.assert_array_equal(results[3], np.full(2, size))


def test_sessions_of_tensorflow_1(run_ranks):
    run_ranks(2, sessions)


def many_steps():
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd
    from bagua_hvd.tensorflow.bridge import Bridge
    from memory import resident_nbytes

    hvd.init()
    bridge = Bridge(lambda index, view: None, lambda: None)

    def step(x):
        y = hvd.allreduce(x, name="a") + hvd.broadcast(x, 0, name="b")
        return y + bridge.exchange([y, x * 2.0])[0]

    x = tf.ones([25_000])
    graph, compiled = tf.function(step), tf.function(step, jit_compile=True)
    gather = tf.function(lambda x: hvd.allgather(x, name="c") + hvd.alltoall(tf.tile(x, [hvd.size()]), name="d")[0])

    def some(count):
        for i in range(count):
            graph(x)
            if i % 4 == 0:
                compiled(x)
                gather(x)
        return resident_nbytes()

    before = some(100)
    grown = some(2000) - before
    # If any tensor of a step leaked, it would be 2000 * 100 kB, or 500 * 100 kB = 50 MB.
    assert grown < 25_000_000, f"{grown} bytes more after 2000 steps"


@pytest.mark.long
def test_memory_stays_the_same(run_ranks):
    run_ranks(2, many_steps, timeout=110)


def captured_tensors():
    """A graph with captured tensors gets equal names on ranks that have traced different functions before."""
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()
    for _ in range(hvd.rank()):         # traced on one rank only
        outside = tf.ones(3)
        tf.function(lambda outside=outside: outside + 1)()
    one, two = tf.ones(3), tf.ones([2, 2]) * hvd.rank()

    @tf.function
    def reduce():
        return hvd.allreduce(one, op=hvd.Sum), hvd.allreduce(two, op=hvd.Sum), hvd.grouped_reducescatter(
            [two, two], op=hvd.Sum)

    ones, twos, (rows, _) = reduce()
    assert ones.numpy().tolist() == [2.0] * 3 and twos.numpy().tolist() == [[1.0, 1.0]] * 2
    assert rows.numpy().tolist() == [[1.0, 1.0]]


def test_captured_tensors(run_ranks):
    run_ranks(2, captured_tensors, env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
                                        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10"})
