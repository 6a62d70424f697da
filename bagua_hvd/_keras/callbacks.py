"""The callbacks of both Keras packages; they work on any backend of Keras 3, and with tf_keras.

Momentum correction (Goyal et al., arXiv:1706.02677) when the learning rate changes from old to new:

    v <- m (new / old) v - new g       instead of       v <- m v - new g

Here v itself is scaled before the step, which is the same step, and also works if it is compiled with m as a constant.
"""
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from bagua_hvd._keras import legacy, values
from bagua_hvd._keras.optimizer import distribution_of, innermost
from bagua_hvd.collectives import rules
from bagua_hvd.collectives.frontend import numpy_frontend as frontend
from bagua_hvd.collectives.objects import extremes
from bagua_hvd.job import basics
from bagua_hvd.job.process_sets import global_process_set
from bagua_hvd.training.model import weights_broadcast

__all__ = ["BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback",
           "LearningRateWarmupCallback", "MetricAverageCallback"]

UNEQUAL_STEPS = (
    "{callback}: an epoch has {least} steps on one rank and {most} on another, so ranks would reach the end of an "
    "epoch in different steps: give all ranks the same number of batches, or pass steps_per_epoch to fit()"
)
_MOST_STEPS = 2**31 - 3


class Callback(keras.callbacks.Callback):
    """A callback of Keras 3 for fit() of tf_keras, too, which calls more methods."""

    def _implements_train_batch_hooks(self):
        return True

    def _implements_test_batch_hooks(self):
        return False

    def _implements_predict_batch_hooks(self):
        return False

    def _check_steps(self):
        """Compares the steps of an epoch between the ranks that train this model together; collective.

        Skipped if Keras does not know them on some rank, and for algorithms in which ranks run at their own pace.

        Raises:
            ValueError: on all ranks, if they are not equal.
        """
        distribution = distribution_of(self.model.optimizer)
        options = None if distribution is None else distribution.reduction.options
        if options is None or not options.communicates or getattr(options.algorithm, "asynchronous", False):
            return
        steps = min(_steps(self.params or {}) or 0, _MOST_STEPS)
        (most, least), = extremes([steps], f"{type(self).__name__}.steps", options.process_set)
        if least and most != least:
            raise ValueError(UNEQUAL_STEPS.format(callback=type(self).__name__, least=least, most=most))


class BroadcastGlobalVariablesCallback(Callback):
    """Gives all ranks the root's model and optimizer, once after each init(), at the end of the first batch.

    By then everything is built, even models that take their shapes from the data.

    Args:
        root_rank: global rank.
        device: unused, for compatibility with Horovod.
        local_variables: variables that keep their values on each rank.
    Raises:
        ValueError: an entry of local_variables is not a variable.
    """

    def __init__(self, root_rank: int, device: str = "",
                 local_variables: Iterable[keras.Variable] | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.local_variables = list(local_variables or [])
        self._broadcast_in: int | None = None       # runtime.inits then
        if not all(hasattr(variable, "assign") for variable in self.local_variables):
            raise ValueError("local_variables: expected variables, such as layer.trainable_weights")

    @property
    def broadcast_done(self) -> bool:
        """Whether it has broadcast since init(): a rank that joins later broadcasts too, so all ranks must."""
        return self._broadcast_in == basics.runtime.inits

    @broadcast_done.setter
    def broadcast_done(self, done: bool) -> None:
        self._broadcast_in = basics.runtime.inits if done else None

    def register_local_var(self, variable: Any) -> None:
        """Excludes one more variable."""
        self.local_variables.append(variable)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self.broadcast_done:
            return
        local = {id(variable) for variable in self.local_variables}
        local |= {id(variable.value) for variable in self.local_variables if isinstance(variable, keras.Variable)}
        variables = [
            variable for variable in self.model.weights + legacy.variables(self.model.optimizer)
            if id(variable) not in local and id(variable.value) not in local
        ]
        values.broadcast_variables(variables, self.root_rank, "BroadcastGlobalVariablesCallback")
        weights_broadcast(global_process_set)
        self.broadcast_done = True


class MetricAverageCallback(Callback):
    """Averages all numbers in `logs` over the ranks at the end of every epoch, in sorted order of their names.

    Put it before callbacks that read metrics, such as ReduceLROnPlateau, so that all ranks do the same.

    Args:
        device: unused, for compatibility with Horovod.
    Raises:
        ValueError: at the beginning of training, ranks have epochs of different lengths.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._check_steps()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        logs = {} if logs is None else logs
        for name in sorted(logs):
            try:
                value = float(logs[name])
            except (TypeError, ValueError):
                continue
            running = rules.allreduce(frontend, np.array(value), False, f"MetricAverageCallback.{name}", basics.Average,
                                      1.0, 1.0, global_process_set, blocking=True)
            logs[name] = float(running.wait())


def _steps(params):
    """Batches in an epoch, from Keras' callback params (in graphs of TensorFlow 1: from samples); None if unknown."""
    samples, batch_size = params.get("samples"), params.get("batch_size")
    return params.get("steps") or (samples and batch_size and -(-samples // batch_size)) or None


class LearningRateScheduleCallback(Callback):
    """Sets the learning rate to initial_lr * multiplier(epoch), and puts it into `logs` as "lr".

    Args:
        initial_lr: learning rate at multiplier 1.
        multiplier: function of the epoch; or a number m, which means m ** (epoch - start_epoch).
        start_epoch, end_epoch: epochs in which it works, without the last one; None: to the end.
        staircase: set it only at the first batch of an epoch; else at every batch, with fractional epochs.
        momentum_correction: see the module; for SGD and RMSprop.
        steps_per_epoch: batches in an epoch, to compute fractions; None: Keras' value.
    Raises:
        ValueError: no initial_lr; or, at the beginning of training, steps_per_epoch is needed and Keras does not know
            it, or ranks have epochs of different lengths.
    """

    def __init__(self, initial_lr: float, multiplier: float | Callable[[int], float], start_epoch: int = 0,
                 end_epoch: int | None = None, staircase: bool = True, momentum_correction: bool = True,
                 steps_per_epoch: int | None = None) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch: Any = steps_per_epoch
        self._given_steps = steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.current_epoch: Any = None

    def _learning_rate(self):
        return float(values.to_array(self.model.optimizer.learning_rate))

    def _adjust(self, epoch):
        old, new = self._learning_rate(), self.initial_lr * self.multiplier(epoch)
        self.model.optimizer.learning_rate = new
        if self.momentum_correction and old and new != old:
            optimizer = innermost(self.model.optimizer)
            if values.to_array(getattr(optimizer, "momentum", 0)).any():
                for velocity in legacy.velocities(optimizer, self.model.trainable_variables):
                    legacy.scale(velocity, new / old)

    def on_train_begin(self, logs: dict | None = None) -> None:
        self.steps_per_epoch = self._given_steps or _steps(self.params or {})
        if not self.staircase and not self.steps_per_epoch:
            raise ValueError(
                f"Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch parameter to "
                f"the {type(self).__name__}()."
            )
        self._check_steps()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._adjust(epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(epoch)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._learning_rate()


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from initial_lr / size to initial_lr over the first epochs.

    With w = warmup_epochs, n ranks, and e = epoch + (batch + 1) / steps_per_epoch:

        lr = initial_lr / n * (e (n - 1) / w + 1)

    which is initial_lr at the last batch of epoch w - 1, and stays. With steps_per_execution > 1 all batches of an
    execution use the rate of its first one, and the end of the epoch sets initial_lr.

    Args:
        initial_lr: the rate to reach, already multiplied by the number of ranks.
        verbose: 1: the first rank prints a message when it is reached. Others: see LearningRateScheduleCallback.
    """

    def __init__(self, initial_lr: float, warmup_epochs: int = 5, momentum_correction: bool = True,
                 steps_per_epoch: int | None = None, verbose: int = 0) -> None:
        def multiplier(epoch):
            epoch += 1.0 / self.steps_per_epoch
            size = basics.size()
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        ends = self.end_epoch is not None and epoch == self.end_epoch - 1
        if ends:                # with steps_per_execution > 1 Keras does not report the start of the last batch
            self._adjust(epoch + 1 - 1 / self.steps_per_epoch)
        super().on_epoch_end(epoch, logs)
        if ends and self.verbose > 0 and basics.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._learning_rate():g}.")


class BestModelCheckpoint(Callback, keras.callbacks.ModelCheckpoint):
    """ModelCheckpoint that keeps only the best model. Set its `filepath` before training; an estimator does that."""

    def __init__(self, monitor: str = "val_loss", verbose: int = 0, save_weights_only: Any = False, mode: str = "auto",
                 save_freq: Any = "epoch") -> None:
        # Keras requires a path with a valid ending, and the path is not known yet.
        path = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(path, monitor=monitor, verbose=verbose, save_best_only=True,
                         save_weights_only=save_weights_only, mode=mode, save_freq=save_freq)
        self.filepath: str | None = None

    def _save_model(self, epoch, batch, logs):
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint has no filepath: set callback.filepath before training")
        super()._save_model(epoch, batch, logs)
