"""Elastic jobs, as the workers see them: a state that survives failures, and the loop that restores it.

    repeat:  state.sync(), unless it may be skipped;  func(state)
             HorovodInternalError:   state.restore()        back to the last commit; raised if ranks disagreed
             HostsUpdatedInterrupt:  nothing                the hosts changed: the state is intact
             reset();  state.on_reset()                     shutdown() and init(): rank and size may change

notification_manager delivers host updates to rank 0 from any thread; the state passes them on in check_host_updates(),
which all ranks call. Nothing else here uses threads.
"""
import functools
import threading
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from bagua_hvd.core.log import logger
from bagua_hvd.job import basics, elastic_worker
from bagua_hvd.job.elastic_worker import HostUpdateResult, Synced, Syncing


class WorkerNotificationManager:
    """Delivers host updates to the states in training."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Any] = []

    def register_listener(self, listener: Any) -> None:
        """From now on calls `listener.on_hosts_updated(timestamp, update_res)` for every update."""
        with self._lock:
            if listener not in self._listeners:
                self._listeners.append(listener)

    def remove_listener(self, listener: Any) -> None:
        """Undoes register_listener(); ignores a listener that is not registered."""
        with self._lock:
            self._listeners = [other for other in self._listeners if other is not listener]

    def handle_hosts_updated(self, timestamp: Any, update_res: Any) -> None:
        """Delivers an update from the driver. Callable from any thread.

        Args:
            timestamp: rises with every update; an update with an old timestamp is a repetition.
            update_res: flags of HostUpdateResult.
        """
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()
elastic_worker.worker.on_hosts_updated = notification_manager.handle_hosts_updated


class State(ABC):
    """Data that must survive a failure or a change of the hosts.

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
        """Adds functions without arguments, called in order after every reset, when rank and size may have changed."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after every reset: discards pending host updates, then calls reset() and the callbacks."""
        self._host_messages.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: Any, update_res: Any) -> None:
        """Stores an update for the next check_host_updates(); see WorkerNotificationManager. Any thread."""
        self._host_messages.append((timestamp, update_res))

    def commit(self) -> None:
        """save(), then check_host_updates(). Call it on all ranks after the same batch.

        Raises:
            HostsUpdatedInterrupt: the hosts changed; elastic.run() catches it.
            HorovodInternalError: a rank was lost; the state has been saved, unless results of the ranks were lost with
                it.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Asks rank 0 whether the hosts changed. Collective: it raises on all ranks, or on none.

        Raises:
            HostsUpdatedInterrupt: the hosts changed. HorovodInternalError: a rank was lost.
        """
        # Only rank 0's updates count; those of other ranks are dropped, so that all ranks act alike.
        update = self._bcast_object(self._news())
        if update is not None:
            raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)

    def _news(self) -> int | None:
        """Combines the host updates that this rank received since the last call; None if there were none."""
        update = None
        while self._host_messages:
            timestamp, result = self._host_messages.popleft()
            if timestamp > self._last_updated_timestamp:
                self._last_updated_timestamp = timestamp
                update = result | (update or HostUpdateResult.no_update)
        return update

    @abstractmethod
    def save(self) -> None:
        """Saves the present values, to which restore() will return."""

    @abstractmethod
    def restore(self) -> None:
        """Restores the values last saved; before the first save, the constructor's."""

    @abstractmethod
    def sync(self) -> None:
        """Broadcasts rank 0's values to every rank and saves them. Collective."""

    def reset(self) -> None:
        """Adapts the state to a new rank and size. For subclasses; does nothing here."""
        return

    def _ended(self) -> None:
        """Called when the training function has returned, before other ranks can know. For subclasses.

        Raises:
            HorovodInternalError: a rank was lost, and the function must be called again.
        """
        return


NEEDLESS = "{state}(every_step=True) keeps every step, so commit() and save() have nothing to do: delete these calls"


class ObjectState(State):
    """A state of plain Python objects, one attribute for each.

    save() keeps references: replace values (`state.epoch += 1`). Changes made in place, as to a list, are not undone.

    Args:
        bcast_object: must also take root_rank= if a subclass has every_step=True. get_rank: see State.
        kwargs: names and first values of the attributes.
    """

    if TYPE_CHECKING:           # the attributes of kwargs
        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = dict(kwargs)
        self._warned = False
        ObjectState._restore_counters(self)

    _every_step: Any = None     # an EveryStep (reduction/every_step.py): then nothing is saved

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

    # Subclasses extend these.

    def _save(self):
        ObjectState._save_counters(self)

    def _restore(self):
        ObjectState._restore_counters(self)

    def _sync(self):
        """Runs after the subclasses have received theirs. Saves only at the end: a failure may come at any time."""
        if self._saved_state:
            counters = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
            for name, value in counters.items() if self._rank() != 0 else ():
                setattr(self, name, value)
        self.save()

    # Called by an EveryStep, like _save() and _restore().

    def _save_counters(self):
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def _restore_counters(self):
        for name, value in self._saved_state.items():
            setattr(self, name, value)

    def _receive(self, root_rank, whole, facts):
        """Gives every rank the values of `root_rank`.

        Args:
            whole: also models and optimizers, which otherwise are equal already. facts: root_rank's _facts(); None:
                they are broadcast.
        Returns:
            root_rank's _facts().
        """
        ObjectState._save_counters(self)
        if facts is None:
            facts = self._bcast_object(self._facts(), root_rank=root_rank)
        if self._rank() != root_rank:
            self._take_facts(facts)
        return facts

    def _facts(self):
        """All values that are not a model's or an optimizer's, by name; usually small."""
        return {"counters": {name: getattr(self, name) for name in self._saved_state}}

    def _take_facts(self, facts):
        self._saved_state = facts["counters"]
        ObjectState._restore_counters(self)

    def _forget_saved(self):
        """Drops the copies of models and optimizers that _save() made."""


reset = basics.restart


def _clear_frames(error):
    """Frees the memory of the failed step.

    A frame that holds the error, whose traceback holds the frame, would keep batches, graphs and connections until
    Python collects garbage.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Makes `func`, whose first argument is a State, survive lost ranks and changes of the hosts; see the module.

    Args:
        reset: function that leaves the job and joins it again.
    Returns:
        A function with the arguments and result of `func`. Other exceptions pass through.
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
                    if elastic_worker.worker.assignment is not None:        # skipped only if all members agreed
                        skip_sync = elastic_worker.worker.assignment.skip_sync
                    state.on_reset()
                if not skip_sync:
                    elastic_worker.send_to_driver(Syncing())
                    if basics.is_initialized():
                        basics.context().await_state(False)
                    state.sync()
                    elastic_worker.send_to_driver(Synced())
                result = func(state, *args, **kwargs)
                state._ended()
                return result
            except HorovodInternalError as error:
                if error.status in (native.ERR_MISMATCH, native.ERR_UNSUPPORTED):
                    raise       # the same calls would fail again
                logger.warning("%s", error)
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

    translated: makes a context that turns the framework's errors about a lost rank into HorovodInternalError.
    """

    def run(func: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: `func` continues when ranks are lost or the hosts change.

        Before the first call of `func` and after every change, the state is synchronized from rank 0. Call no
        collective before that: ranks that join later start there.

        Args:
            func: function whose first argument is the state, such as a TorchState or a KerasState.
        Returns:
            A function with the same arguments and result. Exceptions other than HorovodInternalError,
            HostsUpdatedInterrupt, and TensorFlow's errors about a lost rank pass through it. So does the error if
            ranks disagree about a collective, or one is not supported.
        """

        @functools.wraps(func)
        def within(state, *args, **kwargs):
            with translated():
                return func(state, *args, **kwargs)

        return run_fn(within, reset)

    run.__module__, run.__qualname__ = module, run.__name__     # where the API reference finds it
    return run
