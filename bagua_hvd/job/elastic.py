"""Elastic jobs, as the workers see them: a state that survives failures, and the loop that brings it back.

    repeat:  state.sync(), unless it may be skipped;  func(state)
             HorovodInternalError:   state.restore()        a rank was lost: back to the last commit
             HostsUpdatedInterrupt:  nothing                the hosts changed: the state is good
             reset();  state.on_reset()                     shutdown() and init(): rank and size may change

News about hosts reaches rank 0 from any thread, through notification_manager; the state passes them on in
check_host_updates(), which all ranks call. Nothing else here knows threads.
"""
import functools
import threading
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from bagua_hvd.core.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from bagua_hvd.job import basics, elastic_worker
from bagua_hvd.job.elastic_worker import HostUpdateResult, Synced, Syncing


class WorkerNotificationManager:
    """Hands news about the hosts to the states that are being trained."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Any] = []

    def register_listener(self, listener: Any) -> None:
        """From now on `listener.on_hosts_updated(timestamp, update_res)` is called for every update."""
        with self._lock:
            if listener not in self._listeners:
                self._listeners.append(listener)

    def remove_listener(self, listener: Any) -> None:
        """Undoes register_listener(); a listener that is not registered does not matter."""
        with self._lock:
            self._listeners = [other for other in self._listeners if other is not listener]

    def handle_hosts_updated(self, timestamp: Any, update_res: Any) -> None:
        """Takes an update from the driver. Any thread.

        Args:
            timestamp: rises with every update; one that is not newer than those before is a repetition.
            update_res: of HostUpdateResult.
        """
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()
elastic_worker.worker.on_hosts_updated = notification_manager.handle_hosts_updated


class State(ABC):
    """What must survive a failure or a change of the hosts.

    Args:
        bcast_object: function of an object that returns rank 0's on every rank; collective.
        get_rank: function that returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: deque[tuple[Any, Any]] = deque()
        self._last_updated_timestamp = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Any) -> None:
        """Functions without arguments, to be called in order after every reset, when rank and size may be others."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after every reset: forgets news about the hosts, then reset(), then the callbacks."""
        self._host_messages.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: Any, update_res: Any) -> None:
        """Takes news for the next check_host_updates(); see WorkerNotificationManager. Any thread."""
        self._host_messages.append((timestamp, update_res))

    def commit(self) -> None:
        """save(), then check_host_updates(). To be called on all ranks after the same batch.

        Raises:
            HostsUpdatedInterrupt: the hosts changed; elastic.run() catches it.
            HorovodInternalError: a rank was lost; the state has been saved, unless what the ranks computed was lost
                with it.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Learns from rank 0 whether the hosts changed. Collective: it raises on all ranks, or on none.

        Raises:
            HostsUpdatedInterrupt: they did. HorovodInternalError: a rank was lost.
        """
        # Only rank 0 is told by the driver; what others may have heard is dropped, so that all do the same.
        update = self._bcast_object(self._news())
        if update is not None:
            raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)

    def _news(self) -> int | None:
        """The updates of the hosts that this rank has heard of since the last call, as one; None: there were none."""
        update = None
        while self._host_messages:
            timestamp, result = self._host_messages.popleft()
            if timestamp > self._last_updated_timestamp:
                self._last_updated_timestamp = timestamp
                update = result | (update or HostUpdateResult.no_update)
        return update

    @abstractmethod
    def save(self) -> None:
        """Makes the present values those that restore() returns to."""

    @abstractmethod
    def restore(self) -> None:
        """Returns to the values last saved; before the first save, to the constructor's."""

    @abstractmethod
    def sync(self) -> None:
        """Gives every rank the values of rank 0, and saves them. Collective."""

    def reset(self) -> None:
        """Adapts the state to a new rank and size. For subclasses; here nothing."""
        return

    def _ended(self) -> None:
        """Called when the training function has returned, before others can see that. For subclasses; here nothing.

        Raises:
            HorovodInternalError: a rank was lost, and the function must be called again.
        """
        return


NEEDLESS = "{state}(every_step=True) keeps every step, so commit() and save() have nothing to do: delete these calls"


class ObjectState(State):
    """A state of plain Python objects, one attribute for each.

    save() keeps references: replace values (`state.epoch += 1`), for a list that was appended to stays so.

    Args:
        bcast_object: with every_step=True in subclasses, it takes root_rank=, too. get_rank: see State.
        kwargs: names and first values of the attributes.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = dict(kwargs)
        self._warned = False
        ObjectState._restore_counters(self)

    _every_step: Any = None     # an EveryStep (reduction/every_step.py): nothing is saved, then

    def save(self) -> None:
        if self._every_step is None:
            self._save()
        elif not self._warned:
            self._warned = True
            warnings.warn(NEEDLESS.format(state=type(self).__name__), stacklevel=3)

    def restore(self) -> None:
        (self._every_step.restore if self._every_step is not None else self._restore)()

    def sync(self) -> None:
        (self._every_step.sync if self._every_step is not None else self._sync)()

    def _ended(self):
        if self._every_step is not None:
            self._every_step.ended()

    # What subclasses extend.

    def _save(self):
        ObjectState._save_counters(self)

    def _restore(self):
        ObjectState._restore_counters(self)

    def _sync(self):
        """After what subclasses receive. Nothing is saved before all of it is there: a failure may come at any time."""
        if self._saved_state:
            counters = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
            for name, value in counters.items() if self._rank() != 0 else ():
                setattr(self, name, value)
        self.save()

    # What an EveryStep calls, beside _save() and _restore().

    def _save_counters(self):
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def _restore_counters(self):
        for name, value in self._saved_state.items():
            setattr(self, name, value)

    def _receive(self, root_rank, whole, facts):
        """Gives every rank that rank's values.

        Args:
            whole: of models and optimizers, too, which else are equal already. facts: that rank's _facts(); None: they
                are to be broadcast.
        """
        ObjectState._save_counters(self)
        if facts is None:
            facts = self._bcast_object(self._facts(), root_rank=root_rank)
        if self._rank() != root_rank:
            self._take_facts(facts)

    def _facts(self):
        """What is not a model's or an optimizer's, by names: as a rule it is small."""
        return {"counters": {name: getattr(self, name) for name in self._saved_state}}

    def _take_facts(self, facts):
        self._saved_state = facts["counters"]
        ObjectState._restore_counters(self)

    def _forget_saved(self):
        """Drops what _save() has kept of models and optimizers."""


def reset() -> None:
    """Leaves the job and enters it again; rank and size may then be others."""
    basics.restart()


def _clear_frames(error):
    """Frees what the failed step had.

    A frame that holds the error, whose traceback holds the frame, would keep batches, graphs and connections until
    Python collects garbage.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """`func`, whose first argument is a State, made to survive lost ranks and changes of the hosts; see the module.

    Args:
        reset: function that leaves the job and enters it again.
    Returns:
        A function with the arguments of `func` that returns what `func` does, and lets other exceptions pass.
    """

    @functools.wraps(func)
    def run(state, *args, **kwargs):
        if not hasattr(state, "sync"):
            raise TypeError(f"{func.__name__}() takes an hvd.elastic state as its first argument, not {state!r:.100}")
        notification_manager.register_listener(state)
        try:
            return _run(state, args, kwargs)
        finally:
            notification_manager.remove_listener(state)

    def _run(state, args, kwargs):
        skip_sync = reset_required = False
        while True:
            try:
                if reset_required:
                    elastic_worker.worker.may_skip_sync = skip_sync
                    reset()
                    skip_sync = elastic_worker.skip_sync(skip_sync)
                    state.on_reset()
                if not skip_sync:
                    elastic_worker.tell(Syncing())
                    if basics.is_initialized():
                        basics.context().await_state(False)
                    state.sync()
                    elastic_worker.tell(Synced())
                result = func(state, *args, **kwargs)
                state._ended()
                return result
            except HorovodInternalError as error:
                elastic_worker.failed(error)
                state.restore()
                skip_sync = False
                _clear_frames(error)
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
                _clear_frames(interrupt)
            reset_required = True

    return run


def runs(module: str, translated: Callable[[], AbstractContextManager] = nullcontext) -> Callable[..., Any]:
    """A front end's decorator `run`, a function of its module.

    translated: makes a context that turns the framework's errors of a lost rank into HorovodInternalError.
    """

    def run(func: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: `func` goes on when ranks are lost or the hosts change.

        Before the first call of `func` and after every change, the state is synchronized from rank 0. No collective may
        be called before that: ranks that join later begin there.

        Args:
            func: function whose first argument is the state, such as a TorchState or a KerasState.
        Returns:
            A function with the same arguments and result. Exceptions other than HorovodInternalError,
            HostsUpdatedInterrupt, and errors of TensorFlow that a lost rank causes pass through it.
        """

        @functools.wraps(func)
        def within(state, *args, **kwargs):
            with translated():
                return func(state, *args, **kwargs)

        return run_fn(within, reset)

    run.__module__, run.__qualname__ = module, run.__name__     # where the reference finds it
    return run
