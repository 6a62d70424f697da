"""A TorchState without commit(): after a loss training continues after the last step that any rank completed.

A rank has completed a step when its optimizer has changed the weights. All communication of the step has ended then, so
every rank had given its gradients; and a rank that was lost before that has changed no weight of the others. Thus
survivors are in one of two steps. After the next rendezvous they tell each other how many steps they have completed:

    nobody is ahead     each goes back to the beginning of its step, and all repeat it
    somebody is ahead   the first one that is sends its state to all others: model, optimizer, counters

The beginning of a step: counters are those when its first gradient was there, which is after the training loop has
counted the step before. Buffers and torch's random numbers are those when the step before had ended.
"""
import operator
from typing import Any

import torch

from bagua_hvd.core.exceptions import HostsUpdatedInterrupt
from bagua_hvd.job import basics
from bagua_hvd.job.basics import Adasum
from bagua_hvd.job.process_sets import global_process_set
from bagua_hvd.torch.functions import allgather_object
from bagua_hvd.torch.wrapping import Wrapped

CANNOT = (
    "TorchState(every_step=True) cannot keep every step: {why}. Use one DistributedOptimizer, with an algorithm that "
    "only averages gradients, such as gradient_allreduce; or leave out every_step and call commit()"
)


class EveryStep:
    """The steps of a TorchState's optimizer. It is the observer of that one's Reducer.

    Args:
        state: the TorchState. handlers: its StateHandlers, by attribute.
    Attributes:
        completed: how many this rank has made or received; None: it has not received the job's state yet.
    """

    def __init__(self, state: Any, handlers: dict[str, Any]) -> None:
        self.completed: int | None = None
        self._state = state
        self._handlers = handlers
        self._reducer: Any = None
        self._begun = False         # a step; the counters are saved
        self._receives = False      # another rank's state; what this rank had is saved
        self._buffers: list[tuple[dict[str, Any], str]] = []
        self._copied: list[torch.Tensor] = []       # the buffers at the last step's end
        self._kept: list[torch.Tensor] = []         # copies of these
        self._random: list[torch.Tensor] = []

    def step_begins(self) -> None:
        """The first gradient is there, and nothing has been communicated.

        Raises:
            HostsUpdatedInterrupt: on rank 0, when hosts have changed. It leaves the job, which ends this step on all.
        """
        if basics.rank() == 0 and self._state._news() is not None:
            raise HostsUpdatedInterrupt(False)
        self._state._save_counters()
        self._begun = True

    def weights_change(self) -> None:
        """The averages are there; on a GPU, perhaps only enqueued. HorovodInternalError: they are not good."""
        basics.wait_for_gpus()

    def step_ended(self) -> None:
        """The weights are new."""
        if self.completed is not None:
            self.completed += 1
            self._keep()

    @torch.no_grad()
    def _keep(self):
        """Copies what the forward passes of the next step will change."""
        self._begun = False
        self._random = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            self._random.append(torch.cuda.get_rng_state())
        buffers = [owner[name] for owner, name in self._buffers]
        if len(buffers) != len(self._kept) or any(map(operator.is_not, buffers, self._copied)):
            self._copied, self._kept = buffers, [each.clone() for each in buffers]
        elif buffers:
            torch._foreach_copy_(self._kept, buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Undoes the step that has begun; or returns to what this rank had before it began to receive."""
        if self._receives:
            self._receives = False
            self._state._restore()
        elif self.completed is not None:
            if self._begun:
                self._state._restore_counters()
            self._begun = False
            for (owner, name), kept in zip(self._buffers, self._kept, strict=True):
                owner[name].copy_(kept)

    def sync(self) -> None:
        """Brings all ranks to the end of the last step that any of them completed. Collective.

        Raises:
            ValueError: see CANNOT. HorovodInternalError: a rank was lost; restore() is to follow.
        """
        state, mine = self._state, self.completed
        optimizer = _checked(self._handlers.values())
        self._reducer = reducer = optimizer.reducer
        reducer.observer = self
        if mine is not None:
            self.restore()      # nobody has, where hosts have changed
            reducer.model.drop_state(shared=False)      # residuals are of a step that failed
        # What an algorithm keeps for all ranks may differ after such a step: all take it from one.
        keeps = reducer.algorithm.counts_steps or reducer.model.kinds_of_state()[1]
        told = allgather_object((mine, keeps), "elastic.steps")
        steps = [completed for completed, _ in told]
        most = max((completed for completed in steps if completed is not None), default=None)
        root = steps.index(most)
        optimizer.forget_step()
        if mine is None or mine != most:
            if basics.rank() != root:       # which may be lost meanwhile
                state._save()
                self._receives = True
        else:
            torch.set_rng_state(self._random[0])
            for of_gpu in self._random[1:]:
                torch.cuda.set_rng_state(of_gpu)
        state._receive(root, most is None or any(entry != (most, False) for entry in told))
        self._receives = False
        self.completed = most or 0
        state._forget_saved()
        self._buffers = [(module._buffers, name) for handler in self._handlers.values()
                         if isinstance(handler.value, torch.nn.Module) for module in handler.value.modules()
                         for name, buffer in module._buffers.items() if buffer is not None]
        self._keep()

    def ended(self) -> None:
        """Waits until all ranks have made the last step. HorovodInternalError: one was lost before."""
        if basics.is_initialized():
            allgather_object(self.completed, "elastic.ended")
        self._reducer.observer = None


def _checked(handlers):
    """The DistributedOptimizer among them. ValueError: see CANNOT."""
    optimizers = [handler.value for handler in handlers if isinstance(handler.value, Wrapped)]
    why = _why_not(optimizers)
    for handler in handlers:
        if not hasattr(handler, "receive"):
            why = why or f"{type(handler).__name__} has no receive(root_rank)"
    if why is not None:
        raise ValueError(CANNOT.format(why=why))
    return optimizers[0]


def _why_not(optimizers):
    """Why a step of these is not one that either all or nothing of is done; None: it is."""
    if len(optimizers) != 1:
        return f"a rank may be lost between the steps of {len(optimizers)} optimizers" if optimizers else \
            "the state holds no DistributedOptimizer"
    optimizer, = optimizers
    name = type(optimizer.algorithm).__name__ if optimizer.op != Adasum else "op=Adasum"
    if optimizer.reducer is None or not optimizer.algorithm.repeatable:
        models_differ = getattr(optimizer.algorithm, "models_differ", False)
        return f"with {name} " + ("ranks have different models" if models_differ else
                                  "a rank may be lost while weights change")
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS changes weights between communications of one step"
    if optimizer.reducer.model.delay:
        return "with delay=1 gradients of the step before are lost with a rank"
    if optimizer.process_set is not global_process_set:
        return "the optimizer is on a process set"
    return None
