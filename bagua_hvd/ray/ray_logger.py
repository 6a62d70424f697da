"""Sends messages from the ranks to the driver while they run: log() there, the callbacks of run() here."""
from typing import Any

from ray.exceptions import RayActorError

_state: dict[str, Any] = {"queue": None}


def configure(queue: Any) -> None:
    """Sets the destination of log()'s messages: a ray.util.queue.Queue; None discards them."""
    _state["queue"] = queue


def log(info_dict: dict[str, Any]) -> None:
    """Sends a dict to the callbacks of the run() that this rank belongs to; discarded if there are none."""
    if _state["queue"] is not None:
        try:
            _state["queue"].put(info_dict)
        except RayActorError:           # that run() has ended
            configure(None)
