"""DistributedGradientTape: a tf.GradientTape whose gradient() is reduced over the ranks."""
import functools
from typing import Any

import tensorflow as tf

from bagua_hvd._keras import api
from bagua_hvd._keras.api import Groups, Layers
from bagua_hvd._keras.optimizer import HasDistribution
from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.collectives.compression import Compressor
from bagua_hvd.core.identity import ByIdentity
from bagua_hvd.core.util import doc_from
from bagua_hvd.job.basics import Average
from bagua_hvd.job.process_sets import ProcessSet, global_process_set
from bagua_hvd.reduction.options import GradientOptions, groups_of
from bagua_hvd.tensorflow.compression import Compression
from bagua_hvd.tensorflow.graphs import as_written, native_variable
from bagua_hvd.tensorflow.reduction import shared_reductions


class _DistributedGradientTape(tf.GradientTape):
    """The mixin that DistributedGradientTape puts before the class of the given tape.

    It shares the given tape's attributes, so either may end the recording; those in slots are its own.
    """

    __slots__ = ("_local_only", "_local_sources", "_reduction", "_weight")

    def __init__(self, tape, options):
        object.__setattr__(self, "__dict__", tape.__dict__)
        self._reduction = shared_reductions.get(options)
        self._local_sources = ByIdentity(native_variable)
        self._weight = None
        self._local_only = False        # while a Jacobian matrix is computed, from local gradients

    @doc_from(HasDistribution.register_local_var)
    def register_local_source(self, source):
        self._local_sources.add(source)

    def set_weight(self, weight: float | tf.Tensor) -> None:
        """Makes the next gradient() a weighted average: sum of w_i g_i / sum of w_i over the ranks.

        Args:
            weight: number of samples or tokens that this rank's gradients are the mean over, a number or a scalar
                tensor; 0: this rank adds nothing. Give it on all ranks.
        Raises:
            ValueError: from gradient(): op is not Average; the algorithm does not average gradients in every step.
            tf.errors.InvalidArgumentError: from gradient(), on all ranks: a weight is negative or not finite, or all
                are 0.
        """
        self._weight = weight

    @as_written
    def gradient(self, target, sources, output_gradients=None, use_generic_names=False, **kwargs):
        """The gradients of tf.GradientTape, reduced; None for sources without a gradient.

        Args:
            use_generic_names: unused, for compatibility with Horovod: operations are always named by order.
            kwargs: unconnected_gradients, as in tf.GradientTape.
        Raises:
            tf.errors.FailedPreconditionError: ranks disagree. tf.errors.UnknownError: a rank was lost.
        """
        gradients = super().gradient(target, sources, output_gradients, **kwargs)
        if self._local_only:
            return gradients
        weight, self._weight = self._weight, None
        reduced = self._reduction(tf.nest.flatten(gradients), tf.nest.flatten(sources), self._local_sources, weight)
        return tf.nest.pack_sequence_as(gradients, reduced)

    @as_written
    def jacobian(self, target, sources, *args, **kwargs):
        """The Jacobian matrices of tf.GradientTape, reduced; None for sources without one.

        Each is reduced as a whole, by allreduce with this tape's op, whatever the algorithm: there can be no collective
        in the parallel loop that computes the rows.
        """
        return self._reduced_jacobian(super().jacobian, target, sources, *args, **kwargs)

    @as_written
    def batch_jacobian(self, target, source, *args, **kwargs):
        """Like tf.GradientTape's, reduced as in jacobian()."""
        return self._reduced_jacobian(super().batch_jacobian, target, source, *args, **kwargs)

    def _reduced_jacobian(self, compute, target, sources, *args, **kwargs):
        if self._weight is not None:
            raise ValueError("set_weight() is for gradient(): Jacobian matrices are averaged with equal weights")
        self._local_only = True
        try:
            jacobians = compute(target, sources, *args, **kwargs)
        finally:
            self._local_only = False
        reduced = self._reduction.jacobians(tf.nest.flatten(jacobians), tf.nest.flatten(sources), self._local_sources)
        return tf.nest.pack_sequence_as(jacobians, reduced)

    def get_local_and_global_gradients(self, target, sources, output_gradients=None, use_generic_names=False):
        """The local gradients, as two lists of (source, gradient): for registered local sources, and for the others."""
        gradients = super().gradient(target, sources, output_gradients)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True))
        local = [pair for pair in pairs if pair[0] in self._local_sources]
        return local, [pair for pair in pairs if pair[0] not in self._local_sources]


def DistributedGradientTape(gradtape: tf.GradientTape, device_dense: str = "", device_sparse: str = "",
                            compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                            op: int = Average, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
                            groups: Groups = None, process_set: ProcessSet = global_process_set,
                            scale_local_gradients: bool = True,
                            algorithm: str | Algorithm | type[Algorithm] | None = None,
                            delay: int = 0) -> tf.GradientTape:
    """Wraps a tf.GradientTape so that its gradients are reduced over the ranks, in eager mode and in any tf.function.

    Args:
        gradtape: a tf.GradientTape. The result's class derives from its class and has its name.
        device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, num_groups, groups,
            scale_local_gradients: as for DistributedOptimizer, whose register_local_var() is register_local_source().
        op: Average, Sum or Adasum.
        process_set: the ranks that reduce; others get local gradients.
        algorithm: as for DistributedOptimizer. Of Algorithms with equal settings, which each step may make anew, the
            first one is used. Algorithms on weights or momenta need DistributedOptimizer, because they must see its
            step; give it the gradients of a plain tape.
        delay: 1: returns the gradients of the previous call of gradient() for these sources; zeros in the first.
            Communication may last until the next call. One call per step for each list of sources, all of them
            variables. For algorithms that communicate gradients; see docs/algorithms.md.
    Raises:
        ValueError: a wrong argument, or wrapped already; for an unknown algorithm the message lists the known ones. Or
            a tape cannot serve the algorithm.
        NotImplementedError: op=Adasum on a process set, or over a number of ranks that is no power of 2.
    """
    if isinstance(gradtape, _DistributedGradientTape):
        raise ValueError("the tape is a DistributedGradientTape already")
    options = GradientOptions(
        compression, sparse_as_dense, op, gradient_predivide_factor, groups_of(num_groups, groups), process_set,
        algorithm, scale_local_gradients, delay)
    base: Any = type(gradtape)
    return _subclass(base)(gradtape, options)


@functools.cache
def _subclass(base):
    return type(base.__name__, (_DistributedGradientTape, base), {"__doc__": base.__doc__})


@as_written     # AutoGraph would add variables to locals()
@doc_from(DistributedGradientTape, api.PARTIAL, local_layers=api.LOCAL_LAYERS)
def PartialDistributedGradientTape(gradtape: tf.GradientTape, device_dense: str = "", device_sparse: str = "",
                                   compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                                   op: int = Average, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
                                   groups: Groups = None, process_set: ProcessSet = global_process_set,
                                   local_layers: Layers = None, scale_local_gradients: bool = True,
                                   algorithm: str | Algorithm | type[Algorithm] | None = None,
                                   delay: int = 0) -> tf.GradientTape:
    options = locals()
    local = api.weights_of(options.pop("local_layers"))
    tape = DistributedGradientTape(**options)
    for variable in local:
        tape.register_local_source(variable)
    return tape
