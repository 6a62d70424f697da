"""Autograd hooks of one optimizer: they tell its Reducer which gradients are ready, and when a backward pass ends.

    hook on a parameter    its gradient is accumulated; the first hook of a pass asks the engine to call at the end
    end of a pass          usually ends the window, too: post gradients that the pass has not touched, wait for all

so that `p.grad` is the reduced gradient after `backward()`. With gradients_untouched, backward() does not wait.

A rank without a batch communicates in `step()`. Other ranks wait in backward() for all optimizers of that pass, so the
rank communicates for all of these in the first of its steps. It takes the optimizers of its last pass; in the first
step the other ranks send it their numbers (reduction/agreement.py).

A backward pass within a backward pass (reentrant checkpointing) is part of the outer one. Its end triggers nothing, and
its gradients are sent after the outer pass, because a module that is used again adds to them.

Hooks run on the thread that the engine has for the device; one pass at a time. If the parameters lie on several
devices, a lock serializes the hooks.
"""
import functools
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from bagua_hvd.job.basics import Sum
from bagua_hvd.reduction.agreement import takes_one_of
from bagua_hvd.torch.compiled import uncompiled
from bagua_hvd.torch.shards import is_sharded

_WITHIN_BACKWARD = BackwardCFunction.apply.__code__
_BACKWARD = {torch.autograd.backward.__code__, torch.autograd.grad.__code__}
_engine = Variable._execution_engine
_graph_task = torch._C._current_graph_task_id
# By the pass that is ending here: list of (Backward, its passes in a window, whether the window has ended).
_pass_state = threading.local()
_instances: weakref.WeakSet[Any] = weakref.WeakSet()    # all Backwards
_count = itertools.count()
_nothing = type(None)                           # called, it returns None, as a dead weak reference does
_hooked: Any = WeakTensorKeyDictionary()        # parameter -> weak references to the Backwards with hooks on it

SHARED = (
    "{name} is in two DistributedOptimizers, and both would reduce its gradient: delete one of them, or run this "
    "backward pass within no_sync() of the other"
)

TAKEN = (
    "a hook on {name} has set its gradient to None before it was reduced: hooks run in the order of their "
    "registration, so register those that step or clear gradients after DistributedOptimizer(...)"
)

COMPILED = (
    "the backward pass is compiled (torch._dynamo.config.compiled_autograd), and would end before its gradients are "
    "averaged: leave compiled_autograd off, since torch.compile(model) works without it; or pass "
    "gradients_untouched=True to DistributedOptimizer, and do not clip gradients"
)


def _outer_pass():
    """(whether the current pass on this thread is nested in another, the outer node that started it or None)."""
    frame: FrameType | None = sys._getframe(1)
    passes = 0
    while frame is not None:
        if frame.f_code is _WITHIN_BACKWARD:
            return True, frame.f_locals["self"]
        passes += frame.f_code in _BACKWARD
        frame = frame.f_back
    return passes > 1, None


class _End:
    """The engine's callback for the end of a pass. Only the engine holds it, so it dies with a pass that fails.

    gradient_ready: the Reducer's method, which keeps the Reducer alive during the pass. task: the engine's number of
    the pass; None: a nested pass, whose gradients may grow after it has ended.
    """

    __slots__ = ("__weakref__", "_backward", "_outer", "gradient_ready", "task")

    def __init__(self, backward, reducer):
        self._backward = backward
        self._outer = _outer_pass()
        self.task = None if self._outer[0] else _graph_task()
        self.gradient_ready = reducer.gradient_ready

    @uncompiled
    def __call__(self):
        self._backward._end = _nothing
        reducer = self._backward._reducer()
        if reducer is None:
            return
        within, node = self._outer
        if within:
            self._backward.await_outer(node)
            return
        ended = reducer.pass_ended()
        if not reducer.accumulating:
            # After the ends of all other optimizers.
            _pass_state.__dict__.setdefault("backwards", []).append((self._backward, reducer.passes, ended))
            _engine.queue_callback(_on_pass_end)


class Backward:
    """The hooks of one optimizer.

    Args:
        reducer: held weakly, so that a discarded optimizer does not live on in its model.
        source: its TorchSource.
        gradients_untouched: whether the end of a pass does not wait.
        frozen: (name, parameter) pairs of those that do not require a gradient now.
    """

    def __init__(self, reducer: Any, source: Any, gradients_untouched: bool, frozen: Any) -> None:
        self._reducer: Callable[[], Any] = weakref.ref(reducer)
        self._source = source
        self.gradients_untouched = gradients_untouched
        self._frozen: dict[str, Any] = {}       # name -> (parameter without gradients, handle of its hook)
        self._end: Callable[[], Any] = _nothing         # weak reference to the _End of the current pass
        self._lock = threading.RLock()                  # PyTorch runs the hooks of each device on a thread of its own
        # Other Backwards with hooks on parameters of this one -> the name of one shared parameter.
        self._others: weakref.WeakKeyDictionary[Backward, str] = weakref.WeakKeyDictionary()
        # Backwards that the last pass touched and whose windows have as many passes as this one's.
        self._same_pass: weakref.WeakSet[Backward] = weakref.WeakSet()
        self._finalizers: list[Any] = []                # they remove the hooks, at the latest with the reducer
        self.place = next(_count)       # in the order of creation, in which optimizers without a number take theirs
        _instances.add(self)
        self.register(0)
        self._hook_frozen(frozen)

    def register(self, first: int) -> None:
        """Hooks parameter `first` of the TorchSource and those after it; sets missing gradients to zeros."""
        handles, nodes = [], []
        for index, parameter in enumerate(self._source.parameters[first:], first):
            if not is_sharded(parameter):
                # Kept alive: a new node would take the current stream, but a bucket is posted from one stream.
                node = _accumulation(parameter)
                nodes.append(node)
                if parameter.grad is None:
                    handles.append(self._source.begin_with_zeros(index, node))
                if self._source.op == Sum:
                    handles.append(node.register_prehook(functools.partial(self._accumulates, index)))
            handles.append(parameter.register_post_accumulate_grad_hook(functools.partial(self._accumulated, index)))
            self._link_shared_parameters(parameter, self._source.names[index])
        self._at_the_end(handles, nodes)

    def _at_the_end(self, handles, nodes):
        finalizer = weakref.finalize(self._reducer(), _remove, handles, nodes)
        finalizer.atexit = False
        self._finalizers.append(finalizer)

    def close(self) -> None:
        """Removes all hooks: backward passes no longer communicate."""
        for finalizer in self._finalizers:
            finalizer()
        self._reducer = _nothing

    def _hook_frozen(self, frozen):
        """Hooks frozen parameters: a pass over parameters unfrozen since then must also end, with add_unfrozen()."""
        handles = []
        for name, parameter in frozen:
            if parameter.is_floating_point() or parameter.is_complex():     # others never require a gradient
                parameter.requires_grad_(True)      # PyTorch takes hooks only on such
                hook = functools.partial(self._accumulated, None)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
                parameter.requires_grad_(False)
                self._frozen[name] = parameter, handles[-1]
        self._at_the_end(handles, [])

    def _link_shared_parameters(self, parameter, name):
        others = [other for reference in _hooked.get(parameter, ()) if (other := reference()) is not None]
        for other in others:
            self._others[other] = other._others[self] = name
        _hooked[parameter] = [weakref.ref(each) for each in (*others, self)]

    def _reduces(self):
        reducer = self._reducer()
        return reducer is not None and not reducer.accumulating

    def _shared(self):
        """The name of a parameter whose gradient another optimizer is also about to reduce, or None."""
        if not self._reduces():
            return None
        return next((name for other, name in self._others.items() if other._reduces()), None)

    def _check_others(self):
        """Raises ValueError if two optimizers are about to reduce the same gradient."""
        if self._shared() is not None:
            gc.collect()        # a replaced optimizer may be in a reference cycle
            name = self._shared()
            if name is not None:
                raise ValueError(SHARED.format(name=name))

    def add(self, named: Any) -> None:
        """Adds parameters, as (name, parameter) pairs; the same on all ranks."""
        first = len(self._source.parameters)
        self._hook_frozen([pair for pair in named if not pair[1].requires_grad])
        self._reducer().add([self._source.add(name, parameter)
                             for name, parameter in named if parameter.requires_grad])
        self.register(first)

    @uncompiled
    def _accumulated(self, index, parameter):
        """Hook after the accumulation of gradient `index`; None: that of a parameter that was frozen."""
        with self._lock:
            end = self._end() or self._await_end()
            if end is None:
                return
            if index is None:
                self._reducer().mark_pending()
                return
            if parameter.grad is None and self._reduces():
                raise RuntimeError(TAKEN.format(name=self._source.names[index]))
            end.gradient_ready(index, _graph_task() == end.task)

    @uncompiled
    def _accumulates(self, index, _):
        """Hook before the accumulation of gradient `index`."""
        self._source.take_share(index, adds=True)

    def _await_end(self):
        """Asks the engine to call when this pass ends. Returns the _End, or None if the optimizer is gone."""
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")   # drops callbacks of the engine
        if getattr(compiled, "in_compiled_autograd_region", False) and not self.gradients_untouched:
            raise RuntimeError(COMPILED)
        if self._others:
            self._check_others()
        reducer = self._reducer()
        if reducer is None:
            return None
        end = _End(self, reducer)
        self._end = weakref.ref(end)
        _engine.queue_callback(end)
        return end

    def await_outer(self, node: Any) -> None:
        """Asks for the end of the outer pass once it reaches a node after `node`. If it never does: see step()."""
        @uncompiled
        def goes_on(_):
            for handle in handles:
                handle.remove()
            if self._end() is None:
                self._await_end()

        following = [function for function, _ in node.next_functions if function] if node is not None else []
        handles = [function.register_prehook(goes_on) for function in following]

    def complete(self) -> None:
        """Waits for the reduction, if there is anything to communicate."""
        reducer = self._reducer()
        if reducer is None:
            return
        if reducer.untouched:
            ending = [self, *self._untouched_peers(self._same_pass)]
            if all(each.gradients_untouched for each in ending):
                ending = [self]         # no rank waits for the others in backward()
            _complete(ending)
        self._synchronize(reducer)

    def _untouched_peers(self, others):
        """Backwards among `others` that this rank has not touched in this step either, and must complete.

        If a pass has touched one since the last step of this optimizer, that one has already made its own step.
        """
        since = self._reducer().stepped_at
        return [other for other in sorted(others, key=lambda each: each.place) if other is not self
                and (reducer := other._reducer()) is not None and reducer.untouched and reducer.touched_at <= since]

    def _synchronize(self, reducer):
        reducer.synchronize()
        if self._frozen:
            self.add_unfrozen()

    def add_unfrozen(self) -> None:
        """Adds parameters that were frozen and now require a gradient. All ranks must have unfrozen the same ones.

        Raises:
            RuntimeError: the algorithm is asynchronous.
        """
        found = [name for name, (parameter, _) in self._frozen.items() if parameter.requires_grad]
        if not found:
            return
        reducer = self._reducer()
        if reducer.algorithm.asynchronous:
            raise RuntimeError(
                f"{found[0]} was frozen when the optimizer was made and requires a gradient now, which "
                f"{type(reducer.algorithm).__name__} cannot add: unfreeze it before DistributedOptimizer(...)"
            )
        synchronized, first = reducer.synchronized, len(self._source.parameters)
        unfrozen = [self._frozen.pop(name) for name in found]
        _remove([handle for _, handle in unfrozen], [])
        self.add([(name, parameter) for name, (parameter, _) in zip(found, unfrozen, strict=True)])
        if reducer.algorithm.communicates_gradients(reducer.model):
            reducer.reduce_added(first)
        reducer.synchronized = synchronized


@uncompiled
def _on_pass_end():
    """Callback of the engine: the pass has ended, and with it some windows."""
    touched = _pass_state.__dict__.pop("backwards", [])
    ending, waits = [], False
    for backward, passes, window_ended in touched:
        if window_ended:
            ending.append(backward)
            waits = waits or not backward.gradients_untouched
        backward._same_pass = weakref.WeakSet() if len(touched) == 1 else weakref.WeakSet(
            other for other, others, _ in touched if others == passes)
    if waits:
        _complete(ending)


def _complete(backwards):
    """Posts the rest of windows that end together, in the order of their optimizers' numbers, then waits for all.

    Posting comes first because another rank's pass may have touched other optimizers.
    """
    waiting, posted = _communicating(backwards), []
    if len(waiting) > 1:
        _order(waiting)
    while waiting:
        reducer, backward = waiting.pop(0)
        posted.append((reducer, backward))
        reducer.touched()
        known = reducer.following = {       # those whose windows have as many passes
            other.number for other, _ in waiting
            if other.group is reducer.group and other.passes == reducer.passes} if waiting else set()
        if backward.gradients_untouched:
            reducer.agree()
        else:
            reducer.post()
        if reducer.following != known:
            requested = [(other, peer) for other, peer in _communicating(backward._untouched_peers(_instances))
                         if other.group is reducer.group and takes_one_of(other, reducer.following - known)]
            waiting += requested
            _order(waiting)
            same_pass = [backward, *(peer for _, peer in requested)]
            for peer in same_pass:      # until this rank has a pass of its own
                peer._same_pass.update(same_pass)
    failure = None
    for reducer, backward in posted:
        if backward.gradients_untouched:
            continue                            # step() waits for it
        try:
            backward._synchronize(reducer)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _communicating(backwards):
    """(Reducer, Backward) of those for which the end of a pass has anything to do.

    With gradients_untouched only until the ranks have agreed.
    """
    found = []
    for backward in backwards:
        reducer = backward._reducer()
        if reducer is not None and not (backward.gradients_untouched and reducer.agreed):
            found.append((reducer, backward))
    return found


def _order(pairs):
    """Sorts the pairs of _communicating() alike on all ranks."""
    pairs.sort(key=lambda pair: pair[1].place)      # in which those without a number take one
    pairs.sort(key=lambda pair: (pair[0].group.process_set_id, pair[0].number))


def _accumulation(parameter):
    """The graph node that adds to `p.grad`. torch.autograd.grad() does not run it, and it dies unless held."""
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]


def _remove(handles, nodes):
    """Removes hooks. nodes: kept alive until then."""
    for handle in handles:
        handle.remove()
