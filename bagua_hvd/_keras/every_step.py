"""A KerasState without commit(); see reduction/every_step.py.

A train step may be compiled: then no Python code runs after its weights have changed. So the graph of a step ends with
two more parts: it counts itself, and copies the variables that the next forward pass will change. If a step's averages
have arrived, but it failed before counting itself, it may have changed some of the weights. It is then torn, and its
rank takes the state of another rank.
"""
from collections.abc import Iterator
from typing import Any

import keras

from bagua_hvd._keras import legacy, values
from bagua_hvd._keras.optimizer import distribution_of, forget_step
from bagua_hvd.reduction.every_step import EveryStep, refuse, why_not

LATE = (
    "{state}(every_step=True) must be made before the first training step, since it becomes part of the compiled step"
)


class KerasEveryStep(EveryStep):
    """EveryStep for the optimizer of a KerasState.

    Args:
        state: the KerasState, with model and optimizer.
    Raises:
        ValueError: see CANNOT and LATE.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        refuse(state, _why_not(state.optimizer))
        distribution = distribution_of(state.optimizer)
        self._reduction = distribution.reduction
        if self._reduction.reducers():
            raise ValueError(LATE.format(state=type(state).__name__))
        self._reduction.observe(self)       # now, because traced steps depend on it
        model = state.model
        frozen = {id(variable) for layer in model._flatten_layers() for variable in layer._trainable_variables}
        others = set(map(id, [*model.weights, *model.metrics_variables]))
        self._buffers = _with_copies(v for v in model.non_trainable_weights if id(v) not in frozen)
        self._seeds = _with_copies(v for v in model.variables if id(v) not in others)
        self._counted = keras.Variable(0, dtype="int64", trainable=False, name="steps")
        distribution.applied = self._applied

    def _applied(self):
        """The end of each step; see the module."""
        self._copy()
        self._counted.assign_add(1)

    def _copy(self):
        for variable, copy in (*self._buffers, *self._seeds):
            copy.assign(variable)

    def step_ended(self) -> None:
        """The averages have arrived; _applied() follows."""
        if self.completed is not None:
            self.completed += 1
            self._begun = False

    def _observe(self, observer):
        steps = getattr(self._state.model, "steps_per_execution", 1)
        if steps not in (None, 1):
            refuse(self._state, f"with steps_per_execution={steps} callbacks count several steps at once")
        self._reduction.observe(observer)

    def _forget_step(self):
        forget_step(self._state.optimizer)
        for reducer in self._reduction.reducers():
            if self.completed is not None:
                reducer.model.drop_state(shared=True)       # it comes from the failed step
        return False

    def _keep(self):
        self._copy()
        self._counted.assign(self.completed)

    def _undo(self):
        for variable, copy in self._buffers:
            variable.assign(copy)

    def _undo_random(self):
        for variable, copy in self._seeds:
            variable.assign(copy)

    def _torn(self):
        # A single rank of a job that is not elastic communicates nothing, so it does not see steps.
        return int(keras.ops.convert_to_numpy(self._counted)) < (self.completed or 0)

    def _equal_data(self) -> Iterator[Any]:
        reduction = self._reduction
        local = [variable for variable in self._state.model.trainable_variables if variable in reduction._local]
        reduced = [variable for variable in self._state.model.trainable_variables if variable not in reduction._local]
        for variable in reduced if local else [*reduced, *legacy.variables(self._state.optimizer)]:
            yield values.to_array(variable).reshape(-1).view("uint8")


def _with_copies(variables):
    """Pairs of variables and copies of them."""
    return [(variable, keras.Variable(keras.ops.convert_to_numpy(variable), dtype=variable.dtype, trainable=False,
                                      name="kept")) for variable in variables]


def _why_not(optimizer):
    if legacy.is_optimizer(optimizer):
        return "optimizers of tf_keras may average gradients in several places"
    distribution = distribution_of(optimizer)
    if distribution is None:
        return "the state holds no DistributedOptimizer"
    if distribution.passes > 1:
        return "with backward_passes_per_step > 1 a step begins before it communicates"
    options = distribution.reduction.options
    return why_not(options.op, options.algorithm, options.delay, options.process_set)
