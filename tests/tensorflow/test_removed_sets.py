"""Collectives on a process set that is removed: before they run, and while they end."""
import pytest


def traced_before_the_removal():
    import numpy as np
    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd

    hvd.init()
    x = tf.ones([4, 3])
    for collective in (
            lambda x, some: hvd.allreduce(x, op=hvd.Sum, process_set=some),
            lambda x, some: hvd.grouped_allreduce([x, x], op=hvd.Sum, process_set=some),
            lambda x, some: hvd.allgather(x, process_set=some),
            lambda x, some: hvd.broadcast(x, 0, process_set=some),
            lambda x, some: hvd.alltoall(x, process_set=some),
            lambda x, some: hvd.alltoall(x, [1, 3], process_set=some),
            lambda x, some: hvd.reducescatter(x, op=hvd.Sum, process_set=some)):
        some = hvd.add_process_set([0, 1])
        function = tf.function(lambda x, collective=collective, some=some: collective(x, some))
        if some.included():
            function(x)
        hvd.remove_process_set(some)
        if hvd.rank() < 2:
            with pytest.raises(tf.errors.OpError, match="Process set provided does not exist"):
                function(x)
            with pytest.raises(ValueError, match="Process set provided does not exist|not registered"):
                collective(x, some)
        np.testing.assert_array_equal(hvd.allreduce(x, op=hvd.Sum), 3 * x.numpy())


def test_a_graph_over_a_set_that_is_gone(run_ranks):
    run_ranks(3, traced_before_the_removal, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


def removal_while_they_end():
    import threading
    import time

    import tensorflow as tf

    import bagua_hvd.tensorflow as hvd
    from bagua_hvd.job import basics

    hvd.init()
    count, ended = 64, 0
    for _ in range(20):
        some = hvd.add_process_set([0, 1])
        outcome = []
        if not some.included():
            hvd.remove_process_set(some)
            continue

        @tf.function
        def exchange(x, some=some):
            return [hvd.alltoall(x, [2, 2], process_set=some, name=f"t.{i}") for i in range(count)]

        def run(exchange=exchange, outcome=outcome):
            try:
                outcome.append(exchange(tf.range(4)))
            except tf.errors.OpError as error:
                outcome.append(error)

        before = basics.context().counters().operations
        thread = threading.Thread(target=run)
        thread.start()
        # All but the last have been executed; a TensorFlow thread takes their results one by one.
        while basics.context().counters().operations < before + count - 1 and thread.is_alive():
            time.sleep(0)
        hvd.remove_process_set(some)
        thread.join()
        if isinstance(outcome[0], tf.errors.OpError):
            assert "rocess set" in outcome[0].message, outcome[0]
            continue
        ended += 1
        for values, splits in outcome[0]:
            assert values.numpy().tolist() == [2 * hvd.rank(), 2 * hvd.rank() + 1] * 2
            assert splits.numpy().tolist() == [2, 2]
    assert ended or hvd.rank() == 2, "no round had results"


@pytest.mark.long
def test_a_set_that_goes_while_its_collectives_end(run_ranks):
    run_ranks(3, removal_while_they_end, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
