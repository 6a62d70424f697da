"""Elastic states without commit(): after a loss training continues after the last step that any rank completed.

A rank has completed a step when its optimizer has changed the weights. All communication of the step has ended by then,
so every rank has contributed its gradients. A rank that was lost earlier has changed no weight of the others. Thus
survivors are in one of two steps. After the next rendezvous they exchange their numbers of completed steps:

    no rank is ahead    each returns to the beginning of its step, and all repeat it
    some are ahead      the first of them sends its state to all others: model, optimizer, counters

Counters return to their values at the first gradient of the step, after the training loop has counted the step before.
Buffers and random numbers return to their values at the end of the step before.
"""
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import cloudpickle

from bagua_hvd.collectives.objects import allgather_object
from bagua_hvd.core.exceptions import HostsUpdatedInterrupt
from bagua_hvd.job import basics
from bagua_hvd.job.basics import Adasum
from bagua_hvd.job.process_sets import global_process_set

# Counters of up to this size are sent to all in case they need them; larger ones are broadcast by the rank ahead.
_SMALL_BYTES = 1024

CANNOT = (
    "{state}(every_step=True) cannot keep every step: {why}. Use one DistributedOptimizer, with an algorithm that "
    "only averages gradients, such as gradient_allreduce; or leave out every_step and call commit()"
)

TORN = (
    "a rank was lost while all ranks were changing weights: another collective of the compiled step has failed. Move "
    "collectives out of the compiled step, or leave out every_step and call commit()"
)

DIVERGED = (
    "{who} after step {step}: weights or optimizer state are not bit-equal to those of rank {root}. Ranks that join "
    "would continue from one of them. Check for updates outside of the DistributedOptimizer and, with powersgd, "
    "for hosts with different processors; or call commit() instead of every_step=True"
)


class EveryStep(ABC):
    """Tracks the steps of a state's optimizer, as the observer of its Reducers.

    Args:
        state: has _receive(root_rank, whole, facts), _facts(), _save(), _restore(), _forget_saved(), _save_counters()
            and _restore_counters().
    Attributes:
        completed: steps that this rank has made or received; None: it has not received the job's state yet.
        interrupted: whether step_begins() has raised.
    """

    def __init__(self, state: Any) -> None:
        self.completed: int | None = None
        self.interrupted = False
        self._state = state
        self._begun = False         # a step has begun; the counters are saved
        self._receives = False      # takes another rank's state; its own is saved

    def step_begins(self) -> None:
        """The first gradient is ready, and nothing has been communicated.

        Raises:
            HostsUpdatedInterrupt: on rank 0, when hosts have changed. It leaves the job, which ends this step on all.
        """
        if self.interrupted or basics.rank() == 0 and self._state._news() is not None:
            self.interrupted = True
            raise HostsUpdatedInterrupt(False)
        self._state._save_counters()
        self._begun = True

    def weights_change(self) -> None:
        """The averages are complete; on a GPU, perhaps only enqueued. HorovodInternalError: they are not valid."""
        basics.wait_for_gpus()

    def step_ended(self) -> None:
        """The weights have been updated."""
        if self.completed is not None:
            self.completed += 1
            self._begun = False
            self._keep()

    def restore(self) -> None:
        """Undoes the step that has begun, or restores this rank's state from before it began to receive."""
        if self._receives:
            self._receives = False
            self._state._restore()
        elif self.completed is not None:
            if self._begun:
                self._state._restore_counters()
            self._begun = False
            self._undo()

    def sync(self) -> None:
        """Brings all ranks to the end of the last step that any of them completed. Collective.

        Raises:
            ValueError: see CANNOT. RuntimeError: see TORN and DIVERGED, on all ranks.
            HorovodInternalError: a rank was lost; restore() must follow.
        """
        state, mine, torn = self._state, self.completed, False
        self._observe(self)
        self.interrupted = False
        if mine is not None:
            self.restore()      # not done yet if hosts have changed
            torn = self._torn()
        keeps, facts = self._forget_step(), cloudpickle.dumps(state._facts())
        reports = allgather_object((None if torn else mine, keeps, torn, facts if len(facts) <= _SMALL_BYTES else None),
                                   "elastic.steps", global_process_set)
        steps = [completed for completed, *_ in reports]
        most = max((completed for completed in steps if completed is not None), default=None)
        if most is None and any(torn for _, _, torn, _ in reports):
            raise RuntimeError(TORN)
        root = steps.index(most)
        if not torn and mine is not None and mine == most:
            self._undo_random()
        elif basics.rank() != root:     # the root may be lost meanwhile
            state._save()
            self._receives = True
        if most is not None and any(step is None for step in steps):
            self._check_equal([rank for rank, step in enumerate(steps) if step == most], root, most)
        facts = reports[root][-1]
        state._receive(root, most is None or any(entry[:-1] != (most, False, False) for entry in reports),
                       facts and cloudpickle.loads(facts))
        self._receives = False
        self.completed, self._begun = most or 0, False
        state._forget_saved()
        self._keep()

    def _check_equal(self, ranks, root, step):
        """Called when a rank joins: all ranks with the job's state must be bit-equal."""
        mine = zlib.crc32(b"")
        if basics.rank() in ranks:
            for data in self._equal_data():
                mine = zlib.crc32(data, mine)
        reports = allgather_object(mine, "elastic.equal", global_process_set)
        others = [rank for rank in ranks if reports[rank] != reports[root]]
        if others:
            who = ("rank " if len(others) == 1 else "ranks ") + ", ".join(map(str, others))
            raise RuntimeError(DIVERGED.format(who=who, step=step, root=root))

    def ended(self) -> None:
        """Waits until all ranks have made the last step. HorovodInternalError: one was lost before."""
        if basics.is_initialized():
            allgather_object(self.completed, "elastic.ended", global_process_set)
        self._observe(None)

    @abstractmethod
    def _observe(self, observer: Any) -> None:
        """Sets the observer of all Reducers. ValueError: see CANNOT."""

    @abstractmethod
    def _forget_step(self) -> bool:
        """Drops the remains of a failed step. Returns whether algorithms keep other state, which may differ then."""

    @abstractmethod
    def _keep(self) -> None:
        """Copies what the forward passes of the next step will change."""

    @abstractmethod
    def _undo(self) -> None:
        """Restores the buffers that _keep() has copied."""

    @abstractmethod
    def _undo_random(self) -> None:
        """Restores the random number generators that _keep() has copied."""

    @abstractmethod
    def _equal_data(self) -> Iterable[Any]:
        """The bytes of weights and optimizer state, which must be equal on all ranks."""

    def _torn(self) -> bool:
        """Whether some of the weights are of one step, and some of the next."""
        return False


def refuse(state: Any, why: str | None) -> None:
    """Raises ValueError (see CANNOT) unless `why` is None."""
    if why is not None:
        raise ValueError(CANNOT.format(state=type(state).__name__, why=why))


def why_not(op: Any, algorithm: Any, delay: int, process_set: Any) -> str | None:
    """Why an optimizer's step with these options is not atomic; None if it is."""
    name = type(algorithm).__name__ if op != Adasum else "op=Adasum"
    if op == Adasum or not algorithm.repeatable:
        return f"with {name} " + ("ranks have different models" if getattr(algorithm, "models_differ", False) else
                                  "a rank may be lost while weights change")
    if delay:
        return "with delay=1, losing a rank loses the gradients of the previous step"
    if process_set is not global_process_set:
        return "the optimizer uses a process set other than the global one"
    return None
