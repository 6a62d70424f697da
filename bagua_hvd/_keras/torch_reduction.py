"""Keras on its torch backend: reduces gradients by the Reducer and the torch front end within apply()."""
import weakref
from collections.abc import Callable
from contextlib import nullcontext as translated_errors  # noqa: F401  (see backend.py)
from typing import Any

import torch

from bagua_hvd._keras import adam, reduction
from bagua_hvd.job.basics import Adasum
from bagua_hvd.reduction.options import GradientOptions
from bagua_hvd.reduction.reducer import Reducer
from bagua_hvd.reduction.weight import Weight
from bagua_hvd.torch.compiled import eager
from bagua_hvd.torch.compression import Compression  # noqa: F401  (see backend.py)
from bagua_hvd.torch.frontend import frontend
from bagua_hvd.torch.mpi_ops import grouped_allreduce
from bagua_hvd.torch.source import TorchSource


def parameter_of(variable: Any) -> Any:
    """torch's parameter behind a Keras variable."""
    return getattr(variable, "value", variable)


class KerasTorchSource(adam.KerasSource, TorchSource):
    """A Source with torch's gradients and weights, and Keras' optimizer and state."""

    def __init__(self, optimizer: Any, passes: int, variables: Any, options: GradientOptions) -> None:
        super().__init__(optimizer, options.compression, options.sparse_as_dense, options.op, options.process_set)
        self._passes = passes
        self._variables = [weakref.ref(variable) for variable in variables]

    def _moments(self, index):
        m, v = (parameter_of(moment).detach()
                for moment in adam.moments(self._optimizer(), self._variables[index]()))
        return frontend.view(m, m), frontend.view(v, v)

    def _number(self, name):
        optimizer = self._optimizer()
        return float(optimizer.iterations if name == "iterations" else adam.learning_rate(optimizer))


class Step:
    """See Reduction. It keeps the variables' parameters alive."""

    has_update = True

    def __init__(self, options: GradientOptions, variables: Any, optimizer: Any, passes: int) -> None:
        self._parameters = list(map(parameter_of, variables))
        self._replaced: list[Any] = []      # (parameter, its gradient before the step) where another one was given
        self.source = KerasTorchSource(optimizer, passes, variables, options)
        members = [
            self.source.add(getattr(variable, "path", f"variable.{i}"), parameter)
            for i, (variable, parameter) in enumerate(zip(variables, self._parameters, strict=True))
        ]
        self.reducer = Reducer(self.source, members, options.algorithm, options.process_set, 1,
                               options.grouped(variables, parameter_of), **options.reducer_arguments)
        self._updates = eager(self.reducer.step)    # whether the algorithm has updated the weights

    def factor_of(self, weight: Any) -> Any:
        return Weight(weight, f"weight.{self.reducer.number}", self.reducer.group).factor()

    @torch.no_grad()
    def exchange(self, gradients: Any, places: Any) -> list:
        self.source.places = places
        if self.reducer.model.window:       # the optimizer failed to apply the last ones
            self.reducer.reset()
        self._replaced.clear()
        self.source.cleared()
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None or parameter.grad is not gradient:
                self._replaced.append((parameter, parameter.grad))
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype, copy=True)
        try:
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    self.reducer.gradient_ready(index)
            self.reducer.synchronize()
        except BaseException:
            self._put_back()
            raise
        return [parameter.grad for parameter in self._parameters]

    def update(self, apply: Callable[..., Any], instead: Callable[..., Any]) -> None:
        (instead if self._updates() else apply)()
        self._stepped()

    @eager
    def _stepped(self):
        self.reducer.stepped()
        self._put_back()

    def _put_back(self):
        while self._replaced:
            parameter, parameter.grad = self._replaced.pop()


class Reduction(reduction.Reduction):
    """The reduction on torch. Only the application of gradients is compiled."""

    fills_in = True
    native = staticmethod(parameter_of)
    __call__ = eager(reduction.Reduction.__call__)

    def dense(self, gradient: Any) -> Any:
        return gradient.to_dense() if gradient.is_sparse else gradient

    def take(self, sums: Any) -> list:
        values = [parameter_of(total).detach().clone() for total in sums]
        for total in sums:
            total.assign(torch.zeros_like(total.value))
        return values

    def _times(self, gradient, factor):
        return gradient * factor if factor else torch.zeros_like(gradient)

    def _make_step(self, variables):
        return Step(self.options, variables, self._optimizer(), self._passes)

    def _adasum(self, gradients):
        return grouped_allreduce(gradients, op=Adasum)
