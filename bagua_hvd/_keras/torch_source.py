"""The Source of Keras on torch: gradients and weights are torch's, the optimizer and its state are Keras'."""
import weakref
from typing import Any

from bagua_hvd._keras import adam
from bagua_hvd.torch.frontend import frontend
from bagua_hvd.torch.source import TorchSource


def parameter_of(variable):
    """torch's parameter behind a variable of Keras."""
    return getattr(variable, "value", variable)


class KerasTorchSource(adam.HasAdam, TorchSource):
    """As torch's, with the optimizer and its state in Keras."""

    def __init__(self, optimizer, passes, variables, compression, options):
        super().__init__(optimizer, compression, options.sparse_as_dense, options.op, options.process_set)
        self._passes = passes
        self._variables = [weakref.ref(variable) for variable in variables]

    def _moment(self, which, index):
        m, v = adam.moments(self._optimizer(), self._variables[index]())
        tensor = parameter_of(m if which == "m" else v).detach()
        return frontend.view(tensor, tensor)

    def _number(self, name):
        optimizer: Any = self._optimizer()
        return float(optimizer.iterations if name == "iterations" else adam.learning_rate(optimizer))
