"""Python values as NumPy arrays: numbers, lists, arrays, tensors of any framework, and variables of Keras; their mean.

Arrays are sent alike on every backend of Keras: weights before training, metrics between epochs and the state of
elastic jobs; but not gradients.
"""
from typing import Any

import keras
import numpy as np

from bagua_hvd._keras import legacy
from bagua_hvd.collectives import rules
from bagua_hvd.collectives.frontend import numpy_frontend as frontend
from bagua_hvd.core.vectors import DTYPES, native_order
from bagua_hvd.job.basics import Average
from bagua_hvd.job.process_sets import ProcessSet, global_process_set


def to_array(value: Any) -> Any:
    """The value as a C-contiguous NumPy array in this machine's byte order; copied only if necessary."""
    if hasattr(value, "detach"):                # torch
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":        # not supported by its numpy()
            import ml_dtypes
            import torch

            return value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    session = legacy.session_backend(value)
    if session is not None:
        value = session.get_value(value)
    # np.ascontiguousarray would make 0-d arrays 1-d.
    return native_order(np.asarray(value.numpy() if hasattr(value, "numpy") else value, order="C"))


def to_send(array: Any) -> Any:
    """The array, or its bytes if the core lacks its dtype; an array of objects is returned unchanged."""
    if array.dtype.name in DTYPES or array.dtype.hasobject:
        return array
    return array.reshape(-1).view(np.uint8)


def as_sent(received: Any, array: Any) -> Any:
    """The data received for to_send(array), with the array's dtype and shape."""
    return received.view(array.dtype).reshape(array.shape)


def assign(variables: Any, arrays: Any) -> None:
    """Assigns arrays to variables of any backend, or of graphs of TensorFlow 1."""
    for variable, array in zip(variables, arrays, strict=True):
        session = legacy.session_backend(variable)
        if session is None:
            variable.assign(array)
        else:
            session.set_value(variable, array)


def broadcast_variables(variables: Any, root_rank: int, name: str | None) -> None:
    """Assigns the root's values to Keras variables; in the same order on all ranks.

    Args:
        name: prefix of the operations' names, which end in the variable's number; unique in this process.
    """
    arrays = list(map(to_array, variables))
    running = [
        rules.broadcast(frontend, to_send(array), root_rank, False, f"{name}.{i}", global_process_set)
        for i, array in enumerate(arrays)
    ]
    assign(variables, (as_sent(each.wait(), array) for each, array in zip(running, arrays, strict=True)))


class consensus:
    """Sets a model's floating-point variables to their mean over the ranks, at once. Collective.

        hvd.consensus(model)                    # from here on all ranks have the mean

        with hvd.consensus(model):              # for this block only: evaluation, a checkpoint
            model.evaluate(...)

    Not within a tf.function. With algorithm="async", call `optimizer.algorithm.abort()` before it. Counters and the
    states of random generators keep their values.

    Args:
        model: a Keras model, a tf.Module, or a list of variables, the same on all ranks.
        process_set: the ranks that take part.
    Raises:
        HorovodInternalError: ranks disagree about the model, or one was lost; the model is as before.
    """

    def __init__(self, model: Any, process_set: ProcessSet = global_process_set) -> None:
        # `weights` of a Keras model lacks metrics, which `variables` has.
        variables = getattr(model, "weights", None) or getattr(model, "variables", model)
        unique = {id(variable): variable for variable in variables}         # shared variables once
        self._variables = [v for v in unique.values() if keras.backend.is_float_dtype(_dtype(v))]
        # Copies: a tensor's array may share the variable's memory.
        self._own = [to_array(variable).copy() for variable in self._variables]
        if self._own:
            self._set(rules.grouped_allreduce(
                frontend, self._own, False, "consensus", Average, process_set=process_set, blocking=True
            ).wait())

    def _set(self, arrays):
        assign(self._variables, arrays)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._set(self._own)


def _dtype(variable):
    return keras.backend.standardize_dtype(variable.dtype)
