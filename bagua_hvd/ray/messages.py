"""Collects the ranks' results; while waiting, calls the callbacks with messages that ranks log (ray_logger)."""
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bagua_hvd.core import variables
from bagua_hvd.ray.worker import BECAUSE_OF
from bagua_hvd.runner.job import first_cause

_POLL_SECONDS = 0.1


class Messages:
    """A queue from ranks to callbacks; a context manager. After its exit, messages of the ranks are lost.

    Args:
        callbacks: functions of a message; None or empty: there is no queue.
    Attributes:
        queue: for BaseHorovodWorker.set_queue(); None without callbacks.
    """

    def __init__(self, callbacks: Sequence[Callable[[Any], Any]] | None) -> None:
        self._callbacks = list(callbacks or ())
        self.queue = None
        if self._callbacks:     # on the driver's node, since Ray might choose one that is removed
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            self.queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})

    def deliver(self) -> None:
        """Calls the callbacks with the messages that have arrived."""
        while self.queue is not None:
            try:
                message = self.queue.get_nowait()
            except Empty:
                return
            for callback in self._callbacks:
                callback(message)

    def results(self, references: Sequence[Any]) -> list[Any]:
        """Waits for the results of ranks 0, 1, ..., or until one fails; returns them.

        Raises:
            The exception of the first failed rank; or of the rank that caused it, if that fails within the grace period
            (BAGUA_HVD_GRACE_SECONDS). For a rank that died, a RayActorError that names it.
        """
        references = list(references)
        failed: dict[int, Exception] = {}
        waiting, limit = references, 0.0
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_POLL_SECONDS if self.queue or failed else None)
            self.deliver()
            for reference in done:
                try:
                    ray.get(reference)
                except Exception as error:
                    limit = limit or time.monotonic() + variables.read("BAGUA_HVD_GRACE_SECONDS")
                    failed[references.index(reference)] = error
            if failed:
                rank, known = _cause(failed)
                if known or not waiting or time.monotonic() > limit:
                    first = failed[rank]
                    if isinstance(first, RayActorError):
                        first.error_msg = f"rank {rank} died. {first}"
                    raise first
        self.deliver()
        return ray.get(references)

    def __enter__(self) -> "Messages":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.queue is not None:
            self.queue.shutdown(force=True)


def _cause(failed):
    """(rank, whether no earlier failure of another rank is missing). failed: {rank: error}, in order of arrival."""
    because_of = {rank: getattr(getattr(error, "cause", None), BECAUSE_OF, None) for rank, error in failed.items()}
    rank = first_cause(next(iter(failed)), because_of)
    return rank, because_of[rank] is None or because_of[rank] in failed
