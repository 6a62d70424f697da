"""The functions of both Keras packages, before their signatures differ."""
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import keras
import numpy as np

from bagua_hvd._keras import values
from bagua_hvd._keras.backend import broadcast_global_variables, current  # noqa: F401
from bagua_hvd._keras.optimizer import load_model as _load_model
from bagua_hvd._keras.optimizer import wrap
from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.collectives import rules
from bagua_hvd.collectives.compression import Compressor
from bagua_hvd.collectives.frontend import numpy_frontend as frontend
from bagua_hvd.job.basics import Average, Sum
from bagua_hvd.job.process_sets import ProcessSet, global_process_set
from bagua_hvd.reduction.options import GradientOptions, groups_of

# Of Keras 3, tf_keras or tf.compat.v1. Functions return an optimizer whose class derives from the given one's.
OptimizerT = TypeVar("OptimizerT")
Groups: TypeAlias = int | Sequence[Sequence[keras.Variable]] | None
Layers: TypeAlias = keras.layers.Layer | Sequence[keras.layers.Layer] | None

Compression = current().Compression


def DistributedOptimizer(optimizer: OptimizerT, name: str | None = None, device_dense: str = "",
                         device_sparse: str = "", compression: type[Compressor] = Compression.none,
                         sparse_as_dense: bool = False, gradient_predivide_factor: float = 1.0, op: int = Average,
                         backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
                         num_groups: int = 0, groups: Groups = None, process_set: ProcessSet = global_process_set,
                         scale_local_gradients: bool = True,
                         algorithm: str | Algorithm | type[Algorithm] | None = None, delay: int = 0) -> OptimizerT:
    """Wraps a Keras optimizer so that gradients are reduced over the ranks before it applies them.

    Use it in model.compile(), compiled by XLA or not, and with apply_gradients() in your own loop. Keras saves the
    original optimizer with the model: plain Keras loads it, and load_model() wraps it again.

    Args:
        optimizer: keras.Optimizer, also a LossScaleOptimizer. The result's class derives from its class and has its
            name. Both share hyperparameters and state; use only the result from then on. An optimizer of tf_keras
            (TF_USE_LEGACY_KERAS=1) is made anew from its configuration.
        name, device_dense, device_sparse: unused, for compatibility with Horovod.
        compression: applied to gradients before they are sent: Compression.none, Compression.fp16 or your own.
        sparse_as_dense: send sparse gradients as dense ones; else their rows are gathered (except in XLA programs,
            where shapes are fixed and all are sent as dense).
        gradient_predivide_factor: f: gradients are divided by f before the sum and multiplied by f / size after it.
        op: Average or Sum.
        backward_passes_per_step: number of calls of apply() whose gradients are summed, then sent and applied; the
            other calls only advance `iterations`.
        average_aggregated_gradients: divide that sum by backward_passes_per_step.
        num_groups: deprecated, see groups.
        groups: number of groups, or lists of variables; one operation per group. None: buckets of about
            BAGUA_DEFAULT_BUCKET_SIZE bytes (10 MiB).
        process_set: the ranks that reduce; others apply local gradients.
        scale_local_gradients: divide gradients of variables given to register_local_var() by the number of ranks.
        algorithm: how gradients are communicated: a registered name such as "bytegrad", an Algorithm, or its class.
            None: BAGUA_ALGORITHM, else "gradient_allreduce".
        delay: 1: each step applies the gradients of the previous one, the first step zeros, so communication may take a
            whole step. For algorithms that communicate gradients; see docs/algorithms.md. A single rank applies its own
            at once.
    Returns:
        The optimizer; register_local_var(variable) excludes a variable from the reduction.
    Raises:
        ValueError: a wrong argument, or wrapped already; for an unknown algorithm the message lists the known ones.
    """
    if op not in (Average, Sum):
        raise ValueError(f"op currently only supports Average and Sum in Keras, not {op!r}")
    options = GradientOptions(
        compression, sparse_as_dense, op, gradient_predivide_factor, groups_of(num_groups, groups), process_set,
        algorithm, scale_local_gradients, delay).check()
    return wrap(optimizer, options, backward_passes_per_step, average_aggregated_gradients)


PARTIAL = "Leaves the trainable weights of some layers local; ValueError: an entry is not a layer."
LOCAL_LAYERS = "a layer or a list of layers, built."


def weights_of(local_layers: Layers) -> list[Any]:
    """The trainable weights of a layer, or of several, of either Keras. ValueError: an entry is not a layer."""
    layers: Any = local_layers if isinstance(local_layers, (list, tuple)) else [local_layers]
    layers = [] if local_layers is None else layers
    if not all(hasattr(layer, "trainable_weights") for layer in layers):
        raise ValueError("local_layers: expected layers, of keras or tf.keras")
    return [variable for layer in layers for variable in layer.trainable_weights]


class Value(np.ndarray):
    """A NumPy array that scripts can use like TensorFlow's eager tensor, which Horovod returns here."""

    def numpy(self) -> Any:
        """The plain array; a scalar if it has 0 dimensions."""
        return np.asarray(self)[()]


def _value(result):
    return np.asarray(result).view(Value)


def allreduce(value: Any, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, op: int | None = None,
              compression: type[Compressor] = Compression.none) -> Value:
    """Reduces a value over all ranks.

    Args:
        value: number, array, or tensor of the backend.
        name: ranks match operations by it; None: by the order of unnamed operations.
        average: deprecated: True for op=Average, False for op=Sum.
        prescale_factor, postscale_factor: multiply before and after the reduction.
        op: Average (default), Sum, Min, Max, Product, or Adasum.
        compression: Compression.none, or Compression.fp16: floating-point values are sent as float16.
    Returns:
        A Value: a NumPy array with a method numpy().
    Raises:
        ValueError: a dtype that cannot be sent, a name still in flight, another compression, or both op and average.
        NotImplementedError: Adasum over a number of ranks that is no power of 2.
        HorovodInternalError: ranks disagree about the operation, and the job continues; or a rank was lost.
    """
    if compression not in (Compression.none, Compression.fp16):
        raise ValueError(f"compression={compression!r}: values take Compression.none or Compression.fp16")
    op = rules.handle_average_backwards_compatibility(op, average)
    array = values.to_array(value)
    dtype = array.dtype
    halved = compression is Compression.fp16 and dtype.kind == "f"
    reduced = rules.allreduce(frontend, array.astype("float16") if halved else array, False, name, op, prescale_factor,
                              postscale_factor, global_process_set, blocking=True).wait()
    return _value(reduced.astype(dtype) if halved else reduced)


def allgather(value: Any, name: str | None = None) -> Value:
    """Concatenates the ranks' values along the first dimension, in rank order; returns a Value.

    Args:
        value, name: as for allreduce; at least 1-D, and first dimensions may differ.
    Raises:
        As allreduce.
    """
    return _value(rules.allgather(frontend, values.to_array(value), name, global_process_set, blocking=True).wait())


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Value:
    """Gives all ranks the value of rank `root_rank`; returns a Value.

    Args:
        value, name: as for allreduce; the same shape and dtype on all ranks. Only the root's content matters.
        root_rank: global rank.
    Raises:
        As allreduce; also ValueError: there is no such rank.
    """
    array = values.to_array(value)
    received = rules.broadcast(frontend, values.to_send(array), root_rank, False, name, global_process_set,
                               blocking=True).wait()
    return _value(values.as_sent(received, array))


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Value:
    """Reduces a value and returns this rank's slice of the first dimension as a Value.

    Args:
        value, name: as for allreduce; at least 1-D.
        op: Average (default) or Sum.
    Raises:
        As allreduce; also HorovodInternalError: another op.
    """
    return _value(
        rules.reducescatter(frontend, values.to_array(value), name, op, global_process_set, blocking=True).wait())


def load_model(filepath: str | os.PathLike[str], custom_optimizers: Iterable[type] | None = None,
               custom_objects: dict | None = None, compression: type[Compressor] = Compression.none,
               legacy_opts: bool = False, algorithm: str | Algorithm | type[Algorithm] | None = None,
               delay: int = 0) -> keras.Model:
    """Loads a saved model, and wraps its optimizer by DistributedOptimizer, with the saved state.

    Args:
        filepath: as for keras.models.load_model().
        custom_optimizers: list of optimizer classes that Keras does not know.
        custom_objects: dict of name -> class or function, as for keras.models.load_model().
        compression: see DistributedOptimizer.
        legacy_opts: unused, for compatibility with Horovod: the file says what kind of optimizer it has.
        algorithm: see DistributedOptimizer. If it was saved (as .keras), it continues from its state. State of one
            rank is restored only on the rank that saved it, for an unchanged number of ranks; else it starts anew.
        delay: see DistributedOptimizer. The next step applies gradients that were in flight when the model was saved.
    """
    return _load_model(
        filepath,
        lambda optimizer: DistributedOptimizer(optimizer, compression=compression, algorithm=algorithm, delay=delay),
        custom_optimizers, custom_objects,
    )
