"""Errors: their exceptions, and that the job continues where it can."""
import pytest


def disagreements():
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()
    rank = hvd.rank()

    def check(fragment, call):
        for make in (lambda f: f, tf.function):
            try:
                make(call)()
            except tf.errors.FailedPreconditionError as error:
                assert fragment in str(error), error
            else:
                raise AssertionError(f"no error: {fragment}")
        assert int(hvd.allreduce(tf.constant(1), op=hvd.Sum)) == hvd.size()

    check("Mismatched data types: One rank had type", lambda: hvd.allreduce(
        tf.zeros([2], tf.float32 if rank else tf.float64), name="t"))
    check("Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape",
          lambda: hvd.allreduce(tf.zeros([2 + rank]), name="t"))
    check("Mismatched operations: One rank did an",
          lambda: hvd.allreduce(tf.zeros([2]), name="t") if rank else hvd.allgather(tf.zeros([2]), name="t"))
    check("Mismatched reduction operation",
          lambda: hvd.allreduce(tf.zeros([2]), op=hvd.Sum if rank else hvd.Min, name="t"))
    check("Mismatched prescale and/or postscale factors",
          lambda: hvd.allreduce(tf.zeros([2]), prescale_factor=1.0 + rank, name="t"))
    check("Mismatched BROADCAST root ranks", lambda: hvd.broadcast(tf.zeros([2]), rank, name="t"))
    for scalar in tf.constant(1.0), tf.constant(1j):
        check("rank-zero tensor", lambda scalar=scalar: hvd.allgather(scalar, name="t"))
        check("rank-zero tensor", lambda scalar=scalar: hvd.alltoall(scalar, name="t"))
    check("Mismatched ALLGATHER tensor shapes", lambda: hvd.allgather(tf.zeros([2, 3 + rank]), name="t"))
    # One tensor of a group differs: the whole group fails, on all ranks.
    check("Mismatched ALLREDUCE tensor shapes",
          lambda: hvd.grouped_allreduce([tf.zeros([2 + rank]), tf.zeros([5])], name="t")[1])


def test_disagreements_reach_all_ranks_and_the_job_goes_on(run_ranks):
    run_ranks(2, disagreements)


def gradients_for_different_variables():
    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()
    rank = hvd.rank()

    def check(of_first_rank, of_others, sentence):
        a, b, c = (tf.Variable(1.0, name=name) for name in "abc")
        used = [each for each, name in zip((a, b, c), "abc", strict=True)
                if name in (of_others if rank else of_first_rank)]

        def gradients():
            with tf.GradientTape() as tape:
                loss = tf.add_n([each * 2 for each in used])
            return hvd.DistributedGradientTape(tape).gradient(loss, [a, b, c])

        for make in (lambda f: f, tf.function):
            for _ in range(2):          # the second step raises the same error
                try:
                    make(gradients)()
                except tf.errors.FailedPreconditionError as error:
                    names = ", ".join(each.name for each in used)
                    assert sentence.format(names=names) in str(error), error
                else:
                    raise AssertionError(f"no error: {sentence}")
            assert int(hvd.allreduce(tf.constant(1), op=hvd.Sum)) == hvd.size()
        # The next tape's gradients are reduced.
        used = [b, c]
        np.testing.assert_array_equal([g is not None and float(g) for g in gradients()], [False, 2, 2])

    different = "Ranks have gradients for different variables, {}; this rank has them for {{names}}".format
    check("a", "abc", different("1 on rank 0 and 3 on rank 2"))
    check("ab", "c", different("1 on rank 1 and 2 on rank 0"))
    check("ab", "ac", "Ranks disagree on gradient 1: on rank 0 it is that of 'b:0' (float32[]), on rank 1 that of ")


def test_gradients_for_different_variables(run_ranks):
    run_ranks(3, gradients_for_different_variables)


def disagreement_compiled_by_xla():
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()
    for make in (lambda: hvd.allreduce(tf.zeros([2 + hvd.rank()]), name="t"),
                 lambda: hvd.broadcast(tf.zeros([2]), hvd.rank(), name="t")):
        try:
            tf.function(make, jit_compile=True)()
        except tf.errors.OpError as error:      # XLA raises InternalError for all errors
            assert "Mismatched" in str(error)
        else:
            raise AssertionError("no error")
    assert int(hvd.allreduce(tf.constant(1), op=hvd.Sum)) == hvd.size()


def test_disagreements_in_programs_compiled_by_xla(run_ranks):
    run_ranks(2, disagreement_compiled_by_xla)


def unknown_set(check):
    """Functions with a ProcessSet whose id is unknown raise an error when called, or when traced."""
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd
    import bagua_hvd.tensorflow.keras as keras_hvd

    gone = hvd.ProcessSet([0])
    gone.process_set_id = 7
    x = tf.zeros([4, 2])
    slices, variable = tf.IndexedSlices(x, tf.range(4), None), tf.Variable(x)
    for collective, *arguments in (
            (hvd.allreduce, x), (hvd.allgather, x), (hvd.alltoall, x), (hvd.reducescatter, x), (hvd.broadcast, x, 0),
            (hvd.grouped_allreduce, [x]), (hvd.grouped_allgather, [x]), (hvd.grouped_reducescatter, [x]),
            (hvd.allreduce, slices), (hvd.broadcast_, [variable], 0), (hvd.barrier,)):
        check(lambda call=collective, arguments=arguments: call(*arguments, process_set=gone))
    check(lambda: hvd.size_op(7))
    check(lambda: hvd.DistributedGradientTape(tf.GradientTape(), process_set=gone))
    for module in (hvd, keras_hvd):
        for optimizer in (tf.keras.optimizers.SGD(), tf.compat.v1.train.GradientDescentOptimizer(0.1)):
            if module is hvd or isinstance(optimizer, tf.keras.optimizers.Optimizer):
                check(lambda module=module, optimizer=optimizer: module.DistributedOptimizer(
                    optimizer, process_set=gone))
    check(lambda: hvd.broadcast_object(1, process_set=gone))
    check(lambda: hvd.allgather_object(1, process_set=gone))


def wrong_calls():
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    def check(exception, fragment, call, ways=(lambda f: f, tf.function)):
        for make in ways:
            try:
                make(call)()
            except exception as error:
                assert fragment in str(error), error
            else:
                raise AssertionError(f"no error: {fragment}")

    for grouped in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        check(TypeError, "takes a list of tensors, not a dict", lambda grouped=grouped: grouped({0: tf.zeros(2)}))

    x = tf.zeros([4, 2])
    compiled = (lambda f: tf.function(f, jit_compile=True),)
    not_initialized = "Horovod has not been initialized; use hvd.init()."
    check(tf.errors.FailedPreconditionError, not_initialized, lambda: hvd.allreduce(x))
    check(tf.errors.OpError, not_initialized, lambda: hvd.allreduce(x), compiled)
    check(tf.errors.FailedPreconditionError, not_initialized, lambda: hvd.size_op())
    check(ValueError, not_initialized, hvd.rank)
    assert int(hvd.process_set_included_op()) == -1
    hvd.init()
    invalid = tf.errors.InvalidArgumentError
    check(invalid, "", lambda: hvd.alltoall(x, splits=[5, 0]))
    check(invalid, "", lambda: hvd.alltoall(x, splits=[1, 1, 1]))
    check(invalid, "32-bit integer splits", lambda: hvd.alltoall(x, splits=tf.constant([2, 2], tf.int64)))
    check(invalid, "1-D splits", lambda: hvd.alltoall(x, splits=tf.constant([[2, 2]])))
    check(invalid, "", lambda: hvd.alltoall(tf.zeros([3])))
    check(invalid, "at least one dimension", lambda: hvd.reducescatter(tf.constant(1.0)))
    check(tf.errors.AbortedError, "Reducescatter currently only supports AVERAGE and SUM.",
          lambda: hvd.reducescatter(x, op=hvd.Max))
    check(invalid, "invalid root rank", lambda: hvd.broadcast(x, 7))
    everywhere = (lambda f: f, tf.function, *compiled)
    check(ValueError, "invalid root rank", lambda: hvd.broadcast(x, 2**32), everywhere)
    check(ValueError, "", lambda: hvd.allreduce(x, op=hvd.Sum, average=True))
    check(ValueError, "op=9", lambda: hvd.allreduce(x, op=9))
    check(ValueError, "not registered", lambda: hvd.allreduce(x, process_set=hvd.ProcessSet([0])))
    unknown_set(lambda call: check(ValueError, "not registered", call, everywhere))
    everyone = hvd.global_process_set
    check(TypeError, "`device_dense`, a str, not <ReduceOp.Sum: 1>: write op=", lambda: hvd.reducescatter(x, hvd.Sum))
    check(TypeError, "takes a str as `name`", lambda: hvd.allgather(x, everyone))
    check(TypeError, "takes a str as `name`", lambda: hvd.broadcast_object(x, 0, None, everyone), (lambda f: f,))
    slices = tf.IndexedSlices(x, tf.range(4), None)
    check(NotImplementedError, "sparse_as_dense", lambda: hvd.allreduce(slices, op=hvd.Adasum))
    check(NotImplementedError, "Average or Sum", lambda: hvd.allreduce(slices, op=hvd.Max))
    check(NotImplementedError, "prescale_factor", lambda: hvd.allreduce(slices, prescale_factor=2.0))
    for dtype in (tf.bool, tf.complex64, tf.string):
        check((TypeError, ValueError, tf.errors.InvalidArgumentError), "", lambda dtype=dtype: hvd.allreduce(
            tf.constant(["a"]) if dtype == tf.string else tf.zeros([2], dtype)))
    for parts in (tf.ragged.constant([[1.0], []]), tf.sparse.from_dense(x)):
        for collective in (hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0)):
            check(TypeError, f"not a {type(parts).__name__}", lambda call=collective, parts=parts: call(parts))
    unknown = tf.TensorSpec([None])
    check(ValueError, "known shapes", lambda: tf.function(
        lambda x: hvd.allreduce(x), jit_compile=True, input_signature=[unknown])(x[:, 0]), (lambda f: f,))
    assert int(hvd.allreduce(tf.constant(1), op=hvd.Sum)) == 2
    hvd.shutdown()
    check(tf.errors.FailedPreconditionError, not_initialized, lambda: hvd.allreduce(x))
    hvd.init()
    assert int(hvd.allreduce(tf.constant(1), op=hvd.Sum)) == 2


def test_wrong_calls_are_refused_and_nothing_is_sent(run_ranks):
    run_ranks(2, wrong_calls)


def a_name_twice():
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()

    @tf.function
    def step(x):
        if hvd.rank() == 0:
            return [hvd.allreduce(x, name="same", ignore_name_scope=True) for _ in range(2)]
        return [hvd.allreduce(x, name="same", ignore_name_scope=True)]

    # Rank 1 comes later, so that the first is in flight when rank 0 reaches the second; tracing is done before.
    x = tf.ones([2])
    step = step.get_concrete_function(x)
    hvd.barrier()
    if hvd.rank() == 0:
        try:
            step(x)
        except tf.errors.InvalidArgumentError as error:
            assert "same name as another tensor that is currently being processed" in str(error)
        else:
            raise AssertionError("no error")
    else:
        import time

        time.sleep(2)
        step(x)
    hvd.barrier()


def test_duplicate_name(run_ranks):
    run_ranks(2, a_name_twice)


def lost_peer(compiled):
    import os

    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd
    from bagua_hvd.tensorflow.elastic import translated_errors

    hvd.init()

    @tf.function(jit_compile=compiled)
    def step(x):
        return [hvd.allreduce(x, name=f"t{i}") for i in range(4)]

    try:
        for number in range(1000):
            if hvd.rank() == 1 and number == 1:
                os._exit(0)             # the others may still be in their first step, which then fails
            step(tf.ones([3]))
    except tf.errors.OpError as error:
        assert compiled or isinstance(error, tf.errors.UnknownError), type(error)
        assert "rank 1 was lost" in str(error) or "shut down" in str(error), error
    else:
        raise AssertionError("no error")
    try:
        with translated_errors():
            step(tf.ones([3]))
    except hvd.HorovodInternalError:
        return
    raise AssertionError("no error")


@pytest.mark.parametrize("compiled", [False, True], ids=["graph", "xla"])
def test_lost_rank(run_ranks, compiled):
    run_ranks(3, lost_peer, arguments={"compiled": compiled})


def errors_that_name_an_operation():
    import pytest
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd
    from bagua_hvd.tensorflow.elastic import translated_errors

    hvd.init()
    for message, expected in (("node HorovodAllreduce_x: gone", hvd.HorovodInternalError),
                              ("node MatMul: gone", tf.errors.UnknownError)):
        with pytest.raises(expected), translated_errors():
            raise tf.errors.UnknownError(None, None, message)
    with pytest.raises(tf.errors.InternalError), translated_errors():
        raise tf.errors.InternalError(None, None, "node HorovodAllreduce_x: gone")


def test_errors_that_name_an_operation_are_internal_errors(run_ranks):
    run_ranks(1, errors_that_name_an_operation)


def shutdown_meanwhile():
    import threading

    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()
    errors = []
    x = tf.ones([2])
    name = f"only rank {hvd.rank()} asks"
    step = tf.function(lambda x: hvd.allreduce(x, name=name)).get_concrete_function(x)

    def run():
        try:
            step(x)
        except tf.errors.OpError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    hvd.barrier()
    hvd.shutdown()
    thread.join()
    assert len(errors) == 1
    assert isinstance(errors[0], (tf.errors.UnknownError, tf.errors.FailedPreconditionError)), errors


def test_shutdown_ends_what_is_in_flight(run_ranks):
    run_ranks(2, shutdown_meanwhile)


def without_custom_calls():
    """Simulates a TensorFlow without a registry of custom calls."""
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd
    from bagua_hvd.tensorflow import xla

    hvd.init()
    xla.missing = b"xla::CustomCallTargetRegistry"
    try:
        tf.function(lambda x: hvd.allreduce(x), jit_compile=True)(tf.ones([2]))
    except NotImplementedError as error:
        assert "xla::CustomCallTargetRegistry" in str(error) and "jit_compile=False" in str(error)
    else:
        raise AssertionError("no error")


def test_a_tensorflow_without_custom_calls_says_so(run_ranks):
    run_ranks(1, without_custom_calls)
