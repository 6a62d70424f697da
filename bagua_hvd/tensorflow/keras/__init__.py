# ruff: noqa: F401, F403, F405  (this file lists the names that scripts use)
"""bagua_hvd for tf.keras: `import bagua_hvd.tensorflow.keras as hvd` for `import horovod.tensorflow.keras as hvd`."""
from bagua_hvd._keras import api as _api
from bagua_hvd._keras import types as _types
from bagua_hvd._keras.api import allreduce
from bagua_hvd._keras.surface import *
from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.collectives.compression import Compressor
from bagua_hvd.core.util import doc_from as _doc_from
from bagua_hvd.job import basics as _basics
from bagua_hvd.job.process_sets import add_process_set, remove_process_set
from bagua_hvd.tensorflow.keras import callbacks, elastic


@_doc_from(_api.distributed_optimizer, **_api.UNUSED)
def DistributedOptimizer(optimizer: _types.OptimizerT, name: str | None = None, device_dense: str = "",
                         device_sparse: str = "", compression: type[Compressor] = Compression.none,
                         sparse_as_dense: bool = False, gradient_predivide_factor: float = 1.0, op: int = Average,
                         backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
                         num_groups: int = 0, groups: _types.Groups = None,
                         process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True,
                         algorithm: str | Algorithm | type[Algorithm] | None = None,
                         delay: int = 0) -> _types.OptimizerT:
    return _api.distributed_optimizer(
        optimizer, compression=compression, sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor, op=op, backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients, num_groups=num_groups, groups=groups,
        process_set=process_set, scale_local_gradients=scale_local_gradients, algorithm=algorithm, delay=delay,
    )


__all__ = [name for name in globals() if not name.startswith("_")]
