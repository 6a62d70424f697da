"""A step while it runs: what its bridges call. See step.py for how it is traced, source.py for what it shows."""
from bagua_hvd._keras import adam
from bagua_hvd.reduction.reducer import Reducer
from bagua_hvd.tensorflow.bridge import Bridge
from bagua_hvd.tensorflow.dtypes import native_dtype
from bagua_hvd.tensorflow.source import TensorFlowSource
from bagua_hvd.tensorflow.variables import native_variable
from bagua_hvd.training.buckets import Member


class Looks:
    """What of a step an algorithm, or None, has to do with, as it declares, beside Keras' optimizer, or None.

    Attributes:
        shown: it looks at weights before the optimizer's step. written: it writes them there. after: it looks at them
            after the step. updates: it may update them in the optimizer's place. any: one of these.
        adam: it looks at the optimizer's Adam. variance: Adam's variance is set before its step; with tf_keras, whose
            gradients may be reduced before there is one, where the algorithm looks at weights.
    """

    def __init__(self, algorithm, optimizer):
        uses = set() if algorithm is None else set(algorithm.uses_weights)
        self.written = "before_step" in uses
        self.after = "after_step" in uses
        self.updates = algorithm is not None and algorithm.replaces_step
        self.adam = algorithm is not None and algorithm.uses_adam
        self.shown = bool(uses - {"after_step"}) or self.updates
        self.any = self.shown or self.after
        self.variance = algorithm is not None and algorithm.shares_variance and adam.is_served(
            optimizer, tf_keras=self.any)
        self.adam = self.adam or self.variance


class RunningStep:
    """All steps of some variables, one after the other.

    Args:
        options: GradientOptions, checked. variables: tf.Variables, held weakly.
        optimizer: of Keras, held weakly, or None. passes: its backward passes for each step.
        number: see Reducer.
    Attributes:
        source, reducer. looks: what of it the algorithm has to do with.
        before, after: the Bridges before and after the optimizer's step.
    """

    def __init__(self, options, variables, optimizer=None, passes=1, number=None):
        self.looks = Looks(options.algorithm, optimizer)
        self.source = TensorFlowSource(variables, optimizer, passes)
        members = [
            Member(variable.name, tuple(variable.shape), native_dtype(variable.dtype.base_dtype))
            for variable in variables
        ]
        self.reducer = Reducer(
            self.source, members, options.algorithm, options.process_set, 1,
            options.grouped(variables, native_variable), **options.how, number=number,
        )
        self.before = Bridge(self._put, self._synchronize)
        self.after = Bridge(self._keep, self._stepped)

    def _begins(self, index):
        if index in self.source:
            # The last step was given up half way, by an error elsewhere in the graph.
            self.reducer.reset()

    def _put(self, index, view):
        self._begins(index)
        for ready in self.source.put(index, view):
            self.reducer.gradient_ready(ready)

    def _keep(self, index, view):
        self._begins(index)
        self.source.keep(index, view)

    def _synchronize(self):
        with self.source.held():
            self.reducer.synchronize()
            if self.reducer.step():     # only algorithms that update
                self.source.decide()
        if not self.looks.after:
            self.reducer.stepped()

    def _stepped(self):
        self.reducer.stepped()
        self.source.discard()
