"""A TorchState without commit(); see reduction/every_step.py."""
import operator
from collections.abc import Iterator
from typing import Any

import torch

from bagua_hvd.reduction.every_step import EveryStep, refuse, why_not
from bagua_hvd.torch.wrapping import Wrapped


def bytes_of(tensor: torch.Tensor) -> Any:
    """The bytes of the tensor's elements as a NumPy array, in the order of its shape."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class TorchEveryStep(EveryStep):
    """EveryStep for the optimizer of a TorchState.

    Args:
        state: the TorchState. handlers: its StateHandlers, by attribute.
    """

    def __init__(self, state: Any, handlers: dict[str, Any]) -> None:
        super().__init__(state)
        self._handlers = handlers
        self._optimizer: Any = None
        self._buffers: list[tuple[dict[str, Any], str]] = []
        self._copied: list[torch.Tensor] = []       # the buffers at the end of the last step
        self._kept: list[torch.Tensor] = []         # their copies
        self._random: list[torch.Tensor] = []

    def _observe(self, observer):
        if observer is not None:
            self._optimizer = self._checked()
        if self._optimizer.reducer is not None:     # a single rank, of a job that is not elastic
            self._optimizer.reducer.observer = observer

    def _forget_step(self):
        reducer = self._optimizer.reducer
        if reducer is None:
            return False
        if self.completed is not None:
            reducer.model.drop_state(shared=False)      # residuals come from the failed step
        self._optimizer.forget_step()
        # The algorithm's shared state may differ after such a step: all ranks take it from one.
        return bool(reducer.algorithm.counts_steps or reducer.model.kinds_of_state()[1])

    @torch.no_grad()
    def _keep(self):
        self._random = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            self._random.append(torch.cuda.get_rng_state())
        buffers = [owner[name] for owner, name in self._buffers]
        if len(buffers) != len(self._kept) or any(map(operator.is_not, buffers, self._copied)):
            self._copied, self._kept = buffers, [each.clone() for each in buffers]
        elif buffers:
            torch._foreach_copy_(self._kept, buffers)

    @torch.no_grad()
    def _undo(self):
        for (owner, name), kept in zip(self._buffers, self._kept, strict=True):
            owner[name].copy_(kept)

    def _undo_random(self):
        torch.set_rng_state(self._random[0])
        for of_gpu in self._random[1:]:
            torch.cuda.set_rng_state(of_gpu)

    def sync(self) -> None:
        super().sync()
        self._buffers = [(module._buffers, name) for handler in self._handlers.values()
                         if isinstance(handler.value, torch.nn.Module) for module in handler.value.modules()
                         for name, buffer in module._buffers.items() if buffer is not None]
        self._keep()

    def _equal_data(self) -> Iterator[Any]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                for value in (parameter, *self._optimizer.state.get(parameter, {}).values()):
                    if isinstance(value, torch.Tensor):
                        yield bytes_of(value)

    def _checked(self):
        """The DistributedOptimizer. Raises ValueError: see CANNOT."""
        optimizers = [handler.value for handler in self._handlers.values() if isinstance(handler.value, Wrapped)]
        why = _why_not(optimizers)
        for handler in self._handlers.values():
            if not hasattr(handler, "receive"):
                why = why or f"{type(handler).__name__} has no receive(root_rank)"
        refuse(self._state, why)
        return optimizers[0]


def _why_not(optimizers):
    if len(optimizers) != 1:
        return f"a rank may be lost between the steps of {len(optimizers)} optimizers" if optimizers else \
            "the state holds no DistributedOptimizer"
    optimizer, = optimizers
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS changes weights between communications of one step"
    delay = optimizer.reducer.model.delay if optimizer.reducer is not None else 0
    return why_not(optimizer.op, optimizer.algorithm, delay, optimizer.process_set)
