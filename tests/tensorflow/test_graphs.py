"""The order in which a graph computes the gradients of a backward pass."""
import keras
import pytest
import tensorflow as tf

from bagua_hvd.tensorflow.graphs import one_by_one
from bagua_hvd.tensorflow.util import refs_to_vars, vars_to_refs


def ancestors(op):
    """All operations that this one depends on, by data or by control."""
    found, todo = set(), [op]
    while todo:
        op = todo.pop()
        for before in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
            if before not in found:
                found.add(before)
                todo.append(before)
    return found


def gradients_of_a_chain(weights):
    with tf.GradientTape() as tape:
        values = tf.eye(3)
        for weight in weights:
            values = tf.nn.tanh(values @ weight)
        loss = tf.reduce_sum(values)
    return tape.gradient(loss, weights)


@pytest.mark.parametrize("ordered", [True, False])
def test_one_by_one(ordered):
    """one_by_one() orders the weights' gradients, the last layer's first; without it they are unordered."""
    weights = [tf.Variable(tf.fill((3, 3), 0.1 * (i + 1))) for i in range(5)]
    one_after_another = []

    @tf.function
    def step():
        gradients = gradients_of_a_chain(weights)
        if ordered:
            one_by_one(gradients)
        one_after_another.extend(earlier.op in ancestors(later.op)
                                 for later, earlier in zip(gradients, gradients[1:], strict=False))
        return gradients

    in_graph, eager = step(), gradients_of_a_chain(weights)
    assert one_after_another == [ordered] * 4
    for ours, theirs in zip(in_graph, eager, strict=True):
        tf.debugging.assert_near(ours, theirs)


def test_one_by_one_leaves_other_graphs_alone():
    """Gradients of another graph, and graphs of tf.compat.v1, whose loops do not allow control inputs."""
    outside = tf.ones(3)

    @tf.function
    def step():
        one_by_one([outside])
        return outside + 1.0

    assert step().numpy().tolist() == [2.0] * 3
    with tf.Graph().as_default() as graph:
        value = tf.compat.v1.placeholder(tf.float32, [3])
        one_by_one([value * 2.0])
        last = value * 3.0
        assert last.op in graph.get_operations() and not last.op.control_inputs


def test_references_to_variables():
    variables = [tf.Variable(1.0), (keras.Variable(2.0),)]
    references = vars_to_refs(variables)
    hash(references)
    assert [references[0].deref(), references[1][0].deref()] == [variables[0], variables[1][0].value]
    assert list(map(type, refs_to_vars(references))) == [type(variables[0]), list]
