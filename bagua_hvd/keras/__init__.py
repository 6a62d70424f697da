# ruff: noqa: E402, F401, F403, F405  (this file lists the names that scripts use)
"""bagua_hvd for Keras: write `import bagua_hvd.keras as hvd` instead of `import horovod.keras as hvd`.

It uses the backend that Keras runs on: tensorflow, or torch (KERAS_BACKEND=torch).
"""
from bagua_hvd.core.requirement import require as _require

_require("Keras", (3, 0))       # before anything else can fail

from typing import Any

import keras as _keras

if _keras.backend.backend() != "torch":     # _keras finds torch's front end by itself
    import bagua_hvd.tensorflow as _tensorflow

# isort: split
from bagua_hvd._keras import api as _api
from bagua_hvd._keras.surface import *
from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.collectives.compression import Compressor
from bagua_hvd.core.util import doc_from as _doc_from
from bagua_hvd.job import basics as _basics
from bagua_hvd.job.basics import Adasum
from bagua_hvd.keras import callbacks, elastic


@_doc_from(_api.DistributedOptimizer)
def DistributedOptimizer(optimizer: _api.OptimizerT, name: str | None = None, device_dense: str = "",
                         device_sparse: str = "", compression: type[Compressor] = Compression.none,
                         sparse_as_dense: bool = False, gradient_predivide_factor: float = 1.0, op: int = Average,
                         num_groups: int = 0, groups: _api.Groups = None,
                         algorithm: str | Algorithm | type[Algorithm] | None = None,
                         delay: int = 0) -> _api.OptimizerT:
    return _api.DistributedOptimizer(optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
                                     gradient_predivide_factor, op, num_groups=num_groups, groups=groups,
                                     algorithm=algorithm, delay=delay)


@_doc_from(_api.DistributedOptimizer, _api.PARTIAL, local_layers=_api.LOCAL_LAYERS)
def PartialDistributedOptimizer(optimizer: _api.OptimizerT, name: str | None = None, device_dense: str = "",
                                device_sparse: str = "", compression: type[Compressor] = Compression.none,
                                sparse_as_dense: bool = False, gradient_predivide_factor: float = 1.0,
                                op: int = Average, backward_passes_per_step: int = 1,
                                average_aggregated_gradients: bool = False, groups: _api.Groups = None,
                                process_set: ProcessSet = global_process_set, local_layers: _api.Layers = None,
                                scale_local_gradients: bool = True,
                                algorithm: str | Algorithm | type[Algorithm] | None = None,
                                delay: int = 0) -> _api.OptimizerT:
    local = _api.weights_of(local_layers)
    wrapped: Any = _api.DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        backward_passes_per_step, average_aggregated_gradients, groups=groups, process_set=process_set,
        scale_local_gradients=scale_local_gradients, algorithm=algorithm, delay=delay)
    for variable in local:
        wrapped.register_local_var(variable)
    return wrapped


@_doc_from(_api.allreduce)
def allreduce(value: Any, name: str | None = None, average: bool | None = True, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, op: int | None = None,
              compression: type[Compressor] = Compression.none) -> _api.Value:
    # True is Horovod's default, with which `op=` alone is an error there. Here it is ignored: None averages, too.
    average = None if average is True else average
    return _api.allreduce(value, name, average, prescale_factor, postscale_factor, op, compression)


__all__ = [name for name in globals() if not name.startswith("_")]
