# ruff: noqa: F401  (this file is the list of what scripts use)
"""Callbacks for Model.fit()."""
from bagua_hvd._keras import callbacks as _callbacks
from bagua_hvd._keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)


class BestModelCheckpoint(_callbacks.BestModelCheckpoint):
    __doc__ = _callbacks.BestModelCheckpoint.__doc__

    def __init__(self, monitor="val_loss", verbose=0, mode="auto", save_freq="epoch"):
        super().__init__(monitor, verbose, False, mode, save_freq)
