"""Turns messages of the core into logging records, in a thread that waits for them.

The core cannot call Python: it would wait for the GIL with its lock held, while the thread with the GIL may wait for
the core. So it puts its messages into a queue (core/telemetry), and this thread, which sleeps in the core without the
GIL, takes them out. LOG_STALLED messages (other ranks wait for this one) are logged with the stacks of this process.
"""
import sys
import threading
import traceback
from typing import Any

from bagua_hvd.core import log
from bagua_hvd.core.native import LOG_STALLED

_JOIN_SECONDS = 1


class Listener:
    """Logs the context's messages, until it is shut down.

    Args:
        context: context.Context. steps: function that returns the number of optimizer steps made.
    """

    def __init__(self, context: Any, steps: Any) -> None:
        self._thread = threading.Thread(target=_listen, args=(context, steps), name="bagua_hvd log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Called after the context is shut down: waits up to a second for the thread to log the rest."""
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)


def _listen(context, steps):
    for level, file, line, text in context.records():
        try:
            if level == LOG_STALLED:
                log.logger.warning("%s", _report(text, steps()))
            else:
                log.log_from(file, line, level, text)
        except Exception:
            # Raised by a handler of the script. Later messages are logged nevertheless.
            traceback.print_exc()


def _report(names, steps):
    text = [f"the other ranks wait for rank {log.rank()} with [{names}]. It has made {steps} optimizer steps. Its "
            "stacks (most recent call last):\n"]
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.ident in frames:
            text += [f"  Thread {thread.name}:\n", *traceback.format_stack(frames[thread.ident])]
    return "".join(text).rstrip("\n")
