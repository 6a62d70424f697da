# ruff: noqa: F401  (this file lists the names that scripts use)
"""Callbacks for Model.fit()."""
from bagua_hvd._keras.callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
