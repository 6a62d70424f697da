"""The driver's side of ray_logger: callbacks get what ranks log while their results are waited for."""
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.queue import Empty, Queue

_POLL_SECONDS = 0.1


class Messages:
    """A queue between ranks and callbacks; a context manager, after whose end the ranks' messages are lost.

    Args:
        callbacks: functions of a message; None or empty: there is no queue.
    Attributes:
        queue: for BaseHorovodWorker.set_queue(); None without callbacks.
    """

    def __init__(self, callbacks: Sequence[Callable[[Any], Any]] | None) -> None:
        self._callbacks = list(callbacks or ())
        self.queue = Queue(actor_options={"num_cpus": 0}) if self._callbacks else None

    def deliver(self) -> None:
        """Calls the callbacks with what has come since."""
        while self.queue is not None:
            try:
                message = self.queue.get_nowait()
            except Empty:
                return
            for callback in self._callbacks:
                callback(message)

    def results(self, references: Sequence[Any]) -> list[Any]:
        """Waits for all, or until the first fails; returns what they hold. What that one raises, this does."""
        waiting = list(references)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_POLL_SECONDS if self.queue else None)
            self.deliver()
            ray.get(done)
        self.deliver()
        return ray.get(list(references))

    def __enter__(self) -> "Messages":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.queue is not None:
            self.queue.shutdown(force=True)
