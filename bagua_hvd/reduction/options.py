"""Gradient options: the arguments that optimizers and tapes of all front ends share, checked in one place."""
import math
import numbers
import weakref
from typing import Any, NamedTuple

from bagua_hvd import algorithms
from bagua_hvd.collectives import rules
from bagua_hvd.collectives.compression import is_compression
from bagua_hvd.core.util import deprecated, split_list
from bagua_hvd.job import basics
from bagua_hvd.job.basics import Adasum, Average, Sum
from bagua_hvd.job.process_sets import ProcessSet, global_process_set, registered_id


class GradientOptions(NamedTuple):
    """The arguments; see DistributedOptimizer. Until check(), as the user gave them."""

    compression: Any = None
    sparse_as_dense: bool = False
    op: int = Average
    gradient_predivide_factor: float = 1.0
    groups: Any = None
    process_set: ProcessSet = global_process_set
    algorithm: Any = None
    scale_local_gradients: bool = True
    delay: int = 0

    def check(self) -> Any:
        """Returns the options, checked, with an Algorithm instance as `algorithm` (None for Adasum).

        Raises:
            ValueError: a wrong argument; for an unknown algorithm, the message lists the known ones.
            NotImplementedError: op=Adasum on a process set, or over a number of ranks that is not a power of 2.
        """
        if self.op not in (Average, Sum, Adasum):
            raise ValueError(f"op={self.op!r}: gradients are combined by hvd.Average, hvd.Sum or hvd.Adasum")
        if self.compression is not None and not is_compression(self.compression):
            raise ValueError(f"compression={self.compression!r}: expected one of hvd.Compression, such as "
                             "hvd.Compression.fp16")
        _check_factor(self.gradient_predivide_factor)
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        id = registered_id(self.process_set)
        check_groups(self.groups)
        if isinstance(self.delay, bool) or self.delay not in (0, 1):
            raise ValueError(f"delay={self.delay!r}: expected 0 (gradients are applied in their own step) or 1 (one "
                             "step later)")
        if self.op == Adasum:
            if self.algorithm is not None:
                raise ValueError(f"op=Adasum is an algorithm of its own: it cannot be combined with "
                                 f"algorithm={self.algorithm!r}")
            rules.check_adasum(id, basics.size())
            if self.delay:
                raise ValueError("delay=1 cannot be combined with op=Adasum, which combines steps: use op=Average")
            return self
        algorithm = algorithms.choose(self.algorithm, average=self.op != Sum)
        if self.delay and not algorithm.gradients_only:
            raise ValueError(f"delay=1 is for algorithms that communicate gradients in every step, which "
                             f"{type(algorithm).__name__} does not: leave out delay, or take another algorithm")
        return self._replace(algorithm=algorithm)

    @property
    def reducer_arguments(self) -> dict[str, Any]:
        """Arguments of a Reducer."""
        return {"prescale_factor": 1.0 / self.gradient_predivide_factor,
                "postscale_factor": self.gradient_predivide_factor, "delay": self.delay}

    @property
    def keeps_gradients(self) -> Any:
        """Whether state in the gradients' unit is kept between steps. For checked options."""
        return bool(self.delay) or self.algorithm is not None and self.algorithm.remembers_gradients

    @property
    def communicates(self) -> Any:
        """Whether there is anything to communicate or do; may change with each init()."""
        if self.process_set is not global_process_set and not self.process_set.included():
            return False
        job = basics.runtime.options or basics.job_options()       # which raises
        return job.size > 1 or job.elastic or self.algorithm is not None and self.algorithm.runs_alone

    def grouped(self, variables: Any, of: Any = lambda variable: variable) -> Any:
        """`groups`, of variables or weak references to them, as lists of indices into `variables`, or None.

        Args:
            of: function of a variable that returns the object by which to identify it. Variables in `groups` that are
                not in `variables` are skipped.
        """
        if self.groups is None or self.groups == 0:
            return None
        indices = list(range(len(variables)))
        if isinstance(self.groups, int):
            return [part for part in split_list(indices, self.groups) if part]
        index_of = {id(of(variable)): index for index, variable in enumerate(variables)}
        lists = [[index_of.get(id(of(variable() if isinstance(variable, weakref.ref) else variable)))
                  for variable in group] for group in self.groups]
        return [[index for index in group if index is not None] for group in lists]


def _check_factor(factor):
    try:
        usable = math.isfinite(factor) and factor != 0
    except (TypeError, OverflowError):
        usable = False
    if not usable:
        raise ValueError(f"gradient_predivide_factor={factor!r:.100}: expected a finite number other than 0")


def check_passes(passes: Any) -> None:
    """Raises ValueError unless there can be so many backward passes per step."""
    if isinstance(passes, bool) or not isinstance(passes, numbers.Integral) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0 and an int, not {passes!r:.100}")


def check_groups(groups: Any) -> None:
    """Raises ValueError unless it is None, a number of groups, or lists of distinct variables."""
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0):
        return
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError("groups should be a non-negative integer or a list of lists of tf.Variable, in "
                         "torch of parameters.")
    listed = [id(variable) for group in groups for variable in group]
    if len(set(listed)) < len(listed):
        raise ValueError("a variable or parameter can only appear once in groups")


def groups_of(num_groups: Any, groups: Any) -> Any:
    """`groups`, or the deprecated `num_groups`."""
    if not num_groups:
        return groups
    deprecated("parameter `num_groups`", "`groups`")
    return num_groups if groups is None else groups
