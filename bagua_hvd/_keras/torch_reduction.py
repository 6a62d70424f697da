"""Reduction of gradients for Keras on its torch backend: the Reducer and the torch front end, inside apply()."""
import torch

from bagua_hvd.common.basics import Adasum
from bagua_hvd.common.model import Model
from bagua_hvd.common.reducer import Gradients, Reducer
from bagua_hvd.torch.compression import Compression
from bagua_hvd.torch.mpi_ops import grouped_allreduce
from bagua_hvd.torch.optimizer import _TorchGradients


def _parameter(variable):
    return getattr(variable, "value", variable)


class Reduction:
    """See _keras/backend.py. One Reducer for each list of variables that have gradients."""

    def __init__(self, options):
        self.options = options
        if options.algorithm is not None:
            options.algorithm.prepare(Model("unused", Gradients(), options.process_set))
        self._local = set()
        self._reducers = {}         # ids of parameters -> Reducer
        self._used = None           # the Reducer of the step under way

    @staticmethod
    def identify(variable):
        return id(_parameter(variable))

    @staticmethod
    def dense(gradient):
        return gradient.to_dense() if gradient.is_sparse else gradient

    def register_local(self, variable):
        self._local.add(self.identify(variable))

    def reset(self):
        for reducer in self._reducers.values():
            reducer.reset()

    def __call__(self, gradients, variables):
        options = self.options
        self._used = None
        if not options.communicates:
            return list(gradients)
        reduced = list(gradients)
        travelling = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is not None and self.identify(variable) not in self._local:
                travelling.append(index)
            elif gradient is not None and options.scale_local_gradients:
                reduced[index] = gradient / options.process_set.size()
        if options.op == Adasum:
            sums = grouped_allreduce([gradients[index] for index in travelling], op=Adasum)
        else:
            sums = self._reduce([gradients[index] for index in travelling], [variables[index] for index in travelling])
        for index, gradient in zip(travelling, sums, strict=True):
            reduced[index] = gradient
        return reduced

    @torch.no_grad()
    def _reduce(self, gradients, variables):
        key = tuple(map(self.identify, variables))
        reducer = self._reducers.get(key)
        if reducer is None:
            reducer = self._reducers[key] = self._make_reducer(variables)
        parameters = [_parameter(variable) for variable in variables]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient.to(parameter.dtype)
        for index in range(len(parameters)):
            reducer.gradient_ready(index)
        reducer.synchronize()
        self._used = reducer
        return [parameter.grad for parameter in parameters]

    def _make_reducer(self, variables):
        options = self.options
        compression = Compression.none if options.compression is None else options.compression
        gradients = _TorchGradients(self, compression, options.sparse_as_dense, options.op, options.process_set)
        members = [
            gradients.add(getattr(variable, "path", f"variable.{i}"), _parameter(variable))
            for i, variable in enumerate(variables)
        ]
        return Reducer(gradients, members, options.algorithm, options.process_set, 1,
                       options.grouped(variables, self.identify), *options.factors)

    def stepped(self):
        if self._used is not None:
            self._used.stepped()
