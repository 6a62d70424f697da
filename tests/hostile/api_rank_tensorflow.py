"""A rank that calls TensorFlow's collectives with hostile arguments (test_api.py); arguments: CALLS SEED.

In each round all ranks call the same function, eagerly or within tf.function: with equal arguments, or each with its
own tensors and options, which are valid but make the ranks disagree. A call may return, or raise an error of
TensorFlow, a ValueError, a TypeError or a HorovodInternalError; anything else ends the job. After each round an
allreduce must be correct. Prints how many calls had each ending.
"""
import random
import sys
import warnings

import numpy as np
import tensorflow as tf
from hostile_arguments import SHAPES, Arguments, run_rounds

import bagua_hvd.tensorflow as hvd

ALLOWED = (tf.errors.OpError, ValueError, TypeError, hvd.HorovodInternalError)
# NotImplementedErrors, as in Horovod.
NOT_IMPLEMENTED = ("Adasum does not support non-global process sets.", "The Adasum reduction does not support sparse",
                   "sparse tensors (tf.IndexedSlices)")
DTYPES = [tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64, tf.bool,
          tf.bfloat16, tf.complex64, tf.uint32, tf.uint64, tf.complex128, tf.string, tf.qint8]


class TensorFlowArguments(Arguments):
    """Tensors of TensorFlow, and values that it converts to tensors."""

    def ones(self, count):
        return tf.ones(count)

    def tensor(self):
        rng = self.rng
        if not self.hostile():
            return tf.ones(rng.choice([(6,), (4, 3), (2,)]), rng.choice([tf.float32, tf.int64]))
        shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
        ways = [
            lambda: tf.zeros(shape, dtype), lambda: tf.zeros(shape, dtype), lambda: tf.zeros(shape, dtype),
            lambda: np.zeros(shape), lambda: np.ones((2, 3), ">f4"), lambda: np.ones((3, 4)).T, lambda: None,
            lambda: tf.IndexedSlices(tf.ones((2, 3)), tf.constant([0, 4]), tf.constant([5, 3])),
            lambda: tf.IndexedSlices(tf.ones((2, 3)), tf.constant([0, 9], tf.int64)),
            lambda: tf.sparse.from_dense(tf.eye(3)), lambda: tf.ragged.constant([[1], [2, 3]]), lambda: "tensor",
            lambda: tf.Variable(tf.ones(3)), lambda: tf.constant(["a", "b"]), lambda: rng.choice(self.numbers),
            lambda: [[1.0, 2.0], [3.0]], lambda: [1, 2, 3, 4], lambda: tf.TensorSpec((2,)), lambda: tf.float32,
            lambda: tf.TensorArray(tf.float32, 2), lambda: np.array(["a"]), lambda: np.ones(2, object),
            lambda: tf.data.Dataset.range(3), lambda: tf.range(10)[::3], lambda: tf.random.Generator.from_seed(1),
        ]
        try:
            return rng.choice(ways)()
        except (tf.errors.OpError, ValueError, TypeError):      # TensorFlow has no such tensor
            return tf.zeros(shape)

    def splits(self):
        return super().splits(tf.constant([1, 1]), tf.constant([1, 1], tf.int64), tf.ones((2, 2)), tf.constant(1),
                              tf.constant([[1, 1]]), tf.zeros(0, tf.int32))


def hostile_calls(a):
    """By name: functions without arguments, equal on all ranks."""
    reduced = a.reduction()
    scattered = {name: value for name, value in reduced.items() if name != "average"}
    named, of_set = {"name": a.name()}, {"process_set": reduced["process_set"]}
    compression = {"compression": a.compression()}
    root, tensor, tensors, splits, ranks = a.any_number(0), a.tensor(), a.tensors(), a.splits(), a.ranks()
    values = [tf.Variable(tf.ones(3)), tf.Variable(tf.ones((2, 2), tf.float64))]
    variables = a.rng.choice([values, tensors, tensor, None, {}]) if a.hostile() else values
    return {
        "allreduce": lambda: hvd.allreduce(tensor, **named, **reduced, **compression),
        "grouped_allreduce": lambda: hvd.grouped_allreduce(tensors, **named, **reduced, **compression),
        "allgather": lambda: hvd.allgather(tensor, **named, **of_set),
        "grouped_allgather": lambda: hvd.grouped_allgather(tensors, **named, **of_set),
        "broadcast": lambda: hvd.broadcast(tensor, root, **named, **of_set),
        "broadcast_": lambda: hvd.broadcast_(variables, root, **named, **of_set),
        "broadcast_variables": lambda: hvd.broadcast_variables(variables, root, **of_set),
        "alltoall": lambda: hvd.alltoall(tensor, splits, **named, **of_set),
        "reducescatter": lambda: hvd.reducescatter(tensor, **named, **scattered, **compression),
        "grouped_reducescatter": lambda: hvd.grouped_reducescatter(tensors, **scattered, **compression),
        "barrier": lambda: (hvd.barrier(**of_set), None)[1],        # no function returns an operation of its graph
        "join": lambda: hvd.join(),
        "size_op": lambda: hvd.size_op(root, **named),
        "rank_op": lambda: hvd.rank_op(**named),
        "process_set_included_op": lambda: hvd.process_set_included_op(root, **named),
        "broadcast_object": lambda: hvd.broadcast_object(root, root, **named),
        "allgather_object": lambda: hvd.allgather_object(root, **named),
        "add_process_set": lambda: hvd.add_process_set(ranks),
        "remove_process_set": lambda: hvd.remove_process_set(**of_set),
    }


def different_calls(a):
    """By name: valid calls, some of which match those of other ranks."""
    rng, name = a.rng, f"round.{a.number}"
    shape, dtype = rng.choice([(2,), (4, 3), (6,), (2, 3)]), rng.choice([tf.float32, tf.float64, tf.int32, tf.float16])
    tensor, op = tf.ones(shape, dtype), rng.choice([hvd.Sum, hvd.Min, hvd.Max, hvd.Average])
    tensors = [tensor] * rng.randrange(1, 4)
    splits = rng.choice([None, [1, 1], [0, 0], [2, 0]])
    factor = rng.choice([1.0, 2.0])
    return {
        "allreduce": lambda: hvd.allreduce(tensor, name=name, op=op, prescale_factor=factor),
        "grouped_allreduce": lambda: hvd.grouped_allreduce(tensors, name=name, op=op),
        "allgather": lambda: hvd.allgather(tensor, name=name),
        "grouped_allgather": lambda: hvd.grouped_allgather(tensors, name=name),
        "broadcast": lambda: hvd.broadcast(tensor, rng.randrange(2), name=name),
        "alltoall": lambda: hvd.alltoall(tensor, splits, name=name),
        "reducescatter": lambda: hvd.reducescatter(tensor, name=name, op=hvd.Sum, postscale_factor=factor),
    }


def ending(call, in_graph):
    """How a call ended: "returned", or the name of a permitted error."""
    try:
        result = tf.function(call)() if in_graph else call()
        if isinstance(result, hvd.ProcessSet):
            hvd.remove_process_set(result)
    except NotImplementedError as error:
        if not any(sentence in str(error) for sentence in NOT_IMPLEMENTED):
            raise
        return "NotImplementedError"
    except ALLOWED as error:
        return next(kind.__name__ for kind in ALLOWED if isinstance(error, kind))
    return "returned"


def run_round(number, shared, own, sets, endings):
    alike, in_graph = shared.random() < 0.7, shared.random() < 0.4
    hostility = shared.choice([0.1, 0.3, 0.8])
    a = TensorFlowArguments(hvd, shared, sets, number, hostility, alike, (tf.constant(1), tf.ones(2)))
    seed = shared.getrandbits(60)
    a.rng = random.Random(seed) if alike else own
    functions = hostile_calls(a) if alike else different_calls(a)
    names = sorted(functions)
    if in_graph:        # the other operations run in Python
        names = [name for name in names if not name.endswith(("_object", "process_set", "broadcast_variables"))]
    # One name can belong to different calls, so that ranks disagree about more than the kind.
    name = (random.Random(seed) if alike or shared.random() < 0.5 else own).choice(names)
    endings[name + " in a graph" * in_graph][ending(functions[name], in_graph)] += 1
    for removed in sets[1:3]:
        if removed.process_set_id is None:
            hvd.add_process_set(removed)
    total = hvd.allreduce(tf.range(3) * (hvd.rank() + 1), op=hvd.Sum, name=f"right.{number % 7}")
    assert total.numpy().tolist() == [0, 3, 6], (name, total)


def main(count, seed):
    warnings.simplefilter("ignore")
    tf.get_logger().setLevel("ERROR")
    run_rounds(hvd, run_round, count, seed)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
