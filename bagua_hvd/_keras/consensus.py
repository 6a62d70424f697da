"""Averages the ranks' models, which decentralized and asynchronous algorithms let differ."""
from typing import Any

import keras

from bagua_hvd._keras import values
from bagua_hvd.collectives import rules
from bagua_hvd.collectives.numpy_frontend import frontend
from bagua_hvd.job.basics import Average
from bagua_hvd.job.process_sets import ProcessSet, global_process_set


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
        self._own = [values.to_array(variable).copy() for variable in self._variables]
        if self._own:
            self._set(rules.grouped_allreduce(
                frontend, self._own, False, "consensus", Average, process_set=process_set, blocking=True
            ).wait())

    def _set(self, arrays):
        values.assign(self._variables, arrays)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._set(self._own)


def _dtype(variable):
    return keras.backend.standardize_dtype(variable.dtype)
