"""Elastic training: `@hvd.elastic.run` around a function of a KerasState. The loop is in job/elastic.py.

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(dataset, epochs=epochs - state.epoch, callbacks=[
            hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state)])

With every_step (reduction/every_step.py): a train step may be compiled: then no Python code runs after its weights have
changed. So the graph of a step ends with two more parts: it counts itself, and copies the variables that the next
forward pass will change. If a step's averages have arrived, but it failed before counting itself, it may have changed
some of the weights. It is then torn, and its rank takes the state of another rank.
"""
from collections.abc import Iterator
from typing import Any

import keras

from bagua_hvd._keras import legacy, values
from bagua_hvd._keras.backend import current
from bagua_hvd._keras.callbacks import Callback
from bagua_hvd._keras.optimizer import distribution_of, forget_step
from bagua_hvd.core import objects
from bagua_hvd.job import basics
from bagua_hvd.job.elastic import ObjectState, runs
from bagua_hvd.reduction.agreement import numbers_of, share_numbers, take_numbers
from bagua_hvd.reduction.every_step import EveryStep, refuse, why_not

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


def broadcast_object(obj: Any, root_rank: int = 0) -> Any:
    """Broadcasts under a name of its own, which never matches a broadcast of the script."""
    return objects.broadcast_object(basics.context(), obj, root_rank, basics.rank() == root_rank, "elastic.state")


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


class KerasState(ObjectState):
    """Model, optimizer and other training state, as attributes.

    Args:
        model: built (its weights exist).
        optimizer: None: the one that the model is compiled with, if any, when training first begins.
        every_step: needs no commit(): after a loss training continues after the last step that any rank completed; see
            reduction/every_step.py. Change attributes only between a step and the next collective, as the two callbacks
            do in fit(). Gradients of embeddings are sent as dense ones.
        kwargs: further attributes with their initial values; see ObjectState.
    Raises:
        ValueError: the model is not built: its variables do not exist yet. With every_step: the optimizer is not a
            DistributedOptimizer that can keep every step, or has made a step.
    """

    def __init__(self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None, *,
                 every_step: bool = False, **kwargs: Any) -> None:
        if not model.built or not model.weights:
            raise ValueError("Model must be built first. Run `model.build(input_shape)`, or the model on some data.")
        self.model = model
        self._set_optimizer(optimizer)
        self._has_synced = False
        self._every_step = KerasEveryStep(self) if every_step else None
        self._saved_values: Any = None
        if not every_step:
            self._save_model()
        super().__init__(broadcast_object, basics.rank, **kwargs)

    def _set_optimizer(self, optimizer):
        self.optimizer = optimizer or getattr(self.model, "optimizer", None)
        if self.optimizer is not None and not getattr(self.optimizer, "built", False):
            legacy.build(self.optimizer, self.model.trainable_variables)

    def _variables(self):
        return self.model.weights + legacy.variables(self.optimizer)

    def _save_model(self):
        basics.wait_for_gpus()          # tensors of the torch backend may be on one
        self._saved_values = [values.to_array(variable).copy() for variable in self._variables()]

    def _save(self):
        self._save_model()
        super()._save()

    def _restore(self):
        values.assign(self._variables(), self._saved_values)
        forget_step(self.optimizer)
        super()._restore()

    def _sync(self):
        if self.optimizer is None and not self._has_synced:     # later a rank that joins may not have compiled yet
            self._set_optimizer(None)
            self._save_model()
        self._has_synced = True
        forget_step(self.optimizer)
        values.broadcast_variables(self._variables(), 0, "elastic.state.variables")
        share_numbers((), broadcast_object)
        super()._sync()

    def _receive(self, root_rank, whole, facts):
        if whole:
            values.broadcast_variables(self._variables(), root_rank, "elastic.state.variables")
        facts = super()._receive(root_rank, whole, facts)
        take_numbers((), facts["numbers"])
        return facts

    def _facts(self):
        return {**super()._facts(), "numbers": numbers_of(())}

    def _forget_saved(self):
        self._saved_values = None


class CommitStateCallback(Callback):
    """Commits the state after every few batches, and at the end of every epoch.

    Args:
        state: an elastic state. batches_per_commit: a larger number is faster, and loses more when a rank is lost.
    """

    def __init__(self, state: ObjectState, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._batches_left = batches_per_commit
        self._last = -1

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._batches_left = self.batches_per_commit

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._last = -1

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._batches_left -= max(1, batch - self._last)        # several with steps_per_execution
        self._last = batch
        if self._batches_left <= 0:
            self.state.commit()
            self._batches_left = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(Callback):
    """Keeps the number of completed batches of this epoch in `state.batch`; 0 at its end.

    If fit() begins with some completed, its first epoch is shorter by that number. Put it before callbacks that may
    stop the training, and before CommitStateCallback.

    Args:
        state: an elastic state with an attribute `batch`, at first 0.
    """

    def __init__(self, state: ObjectState) -> None:
        super().__init__()
        self.state = state
        self._done = 0
        self._cut = False

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._done = self.state.batch
        self._cut = False

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.state.batch = self._done + batch + 1
        steps = (self.params or {}).get("steps")
        if self._done and steps and self.state.batch >= steps:
            # Keras leaves the loop over the batches, and reads it again after on_epoch_end().
            self._cut = self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self._cut:
            self._cut = self.model.stop_training = False
        self._done = self.state.batch = 0


class UpdateEpochStateCallback(Callback):
    """Keeps the number of completed epochs in `state.epoch`, over all calls of fit().

    Args:
        state: an elastic state with an attribute `epoch`, at first 0.
    """

    def __init__(self, state: ObjectState) -> None:
        super().__init__()
        self.state = state
        self._offset: Any = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._offset = None

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        # fit(epochs=total - state.epoch) and fit(initial_epoch=state.epoch, epochs=total) are both in use.
        if self._offset is None:
            self._offset = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.state.epoch = self._offset + epoch + 1


run = runs(__name__, lambda: current().translated_errors())
