"""Reduction of gradients for Keras on its torch backend: the Reducer and the torch front end, inside apply()."""
import functools
import weakref

import torch

from bagua_hvd._keras import adam
from bagua_hvd._keras.numbering import Numbered
from bagua_hvd._keras.torch_source import KerasTorchSource, parameter_of
from bagua_hvd.core.identity import ByIdentity
from bagua_hvd.job.basics import Adasum
from bagua_hvd.reduction.reducer import Reducer
from bagua_hvd.torch.compiled import eager
from bagua_hvd.torch.compression import Compression
from bagua_hvd.torch.mpi_ops import grouped_allreduce
from bagua_hvd.training.model import Model


class Reduction(Numbered):
    """See _keras/backend.py. One Reducer for each list of variables that have gradients."""

    def __init__(self, options, optimizer, passes):
        super().__init__()
        self.options = options
        self._optimizer = weakref.ref(optimizer)
        self._passes = passes
        if options.algorithm is not None:
            options.algorithm.prepare(Model("unused", adam.Unbuilt(optimizer), options.process_set, options.algorithm))
        self._local = ByIdentity(parameter_of)
        self._reducers = {}         # ids of parameters -> Reducer, which keeps them alive
        self._used = None           # the Reducer of the step under way

    native = staticmethod(parameter_of)

    @staticmethod
    def dense(gradient):
        return gradient.to_dense() if gradient.is_sparse else gradient

    def register_local(self, variable):
        self._local.add(variable)

    def reset(self):
        for reducer in self._reducers.values():
            reducer.reset()

    @eager
    def __call__(self, gradients, variables):
        options = self.options
        self._used = None
        if not options.communicates:
            return list(gradients)
        reduced = list(gradients)
        travelling = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is not None and variable not in self._local:
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
        parameters = [parameter_of(variable) for variable in variables]
        key = tuple(map(id, parameters))
        reducer = self._reducers.get(key)
        if reducer is None:
            reducer = self._reducers[key] = self.make(functools.partial(self._make_reducer, variables))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient.to(parameter.dtype)
        for index in range(len(parameters)):
            reducer.gradient_ready(index)
        reducer.synchronize()
        self._used = reducer
        return [parameter.grad for parameter in parameters]

    def _make_reducer(self, variables, number):
        options = self.options
        compression = Compression.none if options.compression is None else options.compression
        source = KerasTorchSource(self._optimizer(), self._passes, variables, compression, options)
        members = [
            source.add(getattr(variable, "path", f"variable.{i}"), parameter_of(variable))
            for i, variable in enumerate(variables)
        ]
        return Reducer(source, members, options.algorithm, options.process_set, 1,
                       options.grouped(variables, parameter_of), **options.how, number=number)

    @eager
    def _updates(self):
        """Whether the algorithm has updated the weights."""
        return self._used is not None and self._used.step()

    def update(self, apply, instead):
        (instead if self._updates() else apply)()

    @eager
    def stepped(self):
        if self._used is not None:
            self._used.stepped()
