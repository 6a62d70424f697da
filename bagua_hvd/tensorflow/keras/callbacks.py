"""Callbacks for Model.fit()."""
from bagua_hvd._keras.callbacks import *  # noqa: F403  (names that scripts use)
