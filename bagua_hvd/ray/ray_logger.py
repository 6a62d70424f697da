"""From the ranks to the driver while they run: log() there, the callbacks of run() here."""
from typing import Any

from ray.exceptions import RayActorError

_state: dict[str, Any] = {"queue": None}


def configure(queue: Any) -> None:
    """Where log() puts its messages: a ray.util.queue.Queue; None: nowhere."""
    _state["queue"] = queue


def log(info_dict: dict[str, Any]) -> None:
    """Sends a dict to the callbacks of the run() that this rank is part of; lost when it has none."""
    if _state["queue"] is not None:
        try:
            _state["queue"].put(info_dict)
        except RayActorError:           # that run() has ended
            configure(None)
