"""Callbacks for Model.fit()."""
from typing import Any

from bagua_hvd._keras import callbacks as _callbacks
from bagua_hvd._keras.callbacks import *  # noqa: F403  (names that scripts use)


class BestModelCheckpoint(_callbacks.BestModelCheckpoint):      # type: ignore[no-redef]
    __doc__ = _callbacks.BestModelCheckpoint.__doc__

    def __init__(self, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto",
                 save_freq: Any = "epoch") -> None:
        super().__init__(monitor, verbose, False, mode, save_freq)
