"""A step as it is traced, or made in eager mode: the ops that bring it to its algorithm, and what that made of it back.

    gradients, weights, moments  ->  backward_begins, communicate, before_step, step  ->  the same     exchange()
    the optimizer applies the gradients, unless the algorithm has updated the weights                  update()
    weights                      ->  after_step                                       ->  weights      stepped()

What happens when these ops run is in running_step.py, and where it lies then in source.py. Whether the algorithm or the
optimizer updates the weights is known only then, so the graph has both and a condition: a number that goes over the
bridge with the rest.
"""
import tensorflow as tf

from bagua_hvd._keras import adam
from bagua_hvd.tensorflow.variables import native_variable


class TracedStep:
    """One tracing of a step, or one step in eager mode.

    Args:
        running: the RunningStep. variables: its tf.Variables.
    """

    def __init__(self, running, variables):
        self._running = running
        self._source = running.source
        self._variables = variables
        self._results: dict[int, tf.Tensor] = {}        # of exchange(), by index, but for the gradients

    def _moments(self):
        """By index: the optimizer's variables."""
        layout, optimizer = self._source.layout, self._source.optimizer
        pairs = [adam.moments(optimizer, variable) for variable in self._variables]
        ms, vs = ([native_variable(pair[place]) for pair in pairs] for place in (0, 1))
        return {**dict(enumerate(ms, layout.m)), **dict(enumerate(vs, layout.v))}

    def _tensors_beside(self):
        """By index: what goes over the bridge beside the gradients."""
        looks, layout = self._running.looks, self._source.layout
        tensors: dict[int, tf.Tensor] = {}
        if looks.shown:
            tensors.update(enumerate((variable.read_value() for variable in self._variables), layout.weight))
        if looks.adam:
            tensors.update((index, moment.read_value()) for index, moment in self._moments().items())
            optimizer = self._source.optimizer
            for name, value in (("learning rate", adam.learning_rate(optimizer)), ("iterations", optimizer.iterations)):
                tensors[layout.numbers[name]] = tf.cast(tf.convert_to_tensor(value), tf.float64)
        if looks.updates:
            tensors[layout.decision] = tf.zeros([], tf.int32)
        return tensors

    def exchange(self, gradients):
        """The reduced gradients, dense, in their order."""
        running, layout = self._running, self._source.layout
        tensors = self._tensors_beside()
        self._source.beside = frozenset(tensors)
        # Backward passes yield the last ones first, and in eager mode this is the order in which they travel.
        tensors.update((index, gradients[index]) for index in range(layout.count - 1, -1, -1))
        results = dict(zip(tensors, running.before.exchange(list(tensors.values()), list(tensors)), strict=True))
        reduced = [results.pop(index) for index in range(layout.count)]
        self._results = results
        written = self._assign_weights() if running.looks.written else []
        if running.looks.variance:
            written += self._assign_variances()
        if not written:
            return reduced
        with tf.control_dependencies(_operations(written)):
            return [tf.identity(gradient) for gradient in reduced]

    def _assign_weights(self):
        weight = self._source.layout.weight
        return [variable.assign(self._results[index]) for index, variable in enumerate(self._variables, weight)]

    def _assign_variances(self):
        first = self._source.layout.v
        return [variance.assign(self._results[index])
                for index, variance in self._moments().items() if index >= first]

    def update(self, apply, instead):
        """The optimizer's step, apply(); or, where the algorithm has updated the weights, instead().

        Returns:
            What apply() returns; with algorithms that may update the weights, something that comes after either.
        """
        if not self._running.looks.updates:
            return apply()

        def by_algorithm():
            self._assign_weights()
            if self._running.looks.adam:
                for index, moment in self._moments().items():
                    moment.assign(self._results[index])
            instead()
            return tf.constant(True)

        def by_optimizer():
            apply()
            return tf.constant(False)

        return tf.cond(tf.not_equal(self._results[self._source.layout.decision], 0), by_algorithm, by_optimizer)

    def stepped(self):
        """The optimizer has written the variables. Returns the operations that write them again; [] in eager mode."""
        if not self._running.looks.after:
            return []
        first = self._source.layout.weight
        weights = self._running.after.exchange(
            [variable.read_value() for variable in self._variables], range(first, first + len(self._variables))
        )
        return _operations([variable.assign(weight)
                            for variable, weight in zip(self._variables, weights, strict=True)])


def _operations(assigned):
    return [] if tf.executing_eagerly() else [variable.op for variable in assigned]
