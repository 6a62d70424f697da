"""What the core says becomes records of logging, in a thread that waits for it.

The engine cannot call Python: it would wait for the GIL with its lock held, and who has the GIL may wait for the
engine. So it puts what it says into a queue (core/telemetry), and this thread, which sleeps in the core without the
GIL, takes it out. One kind is no text for people: that other ranks wait for this one; it is told with its stacks.
"""
import sys
import threading
import traceback
from typing import Any

from bagua_hvd.core import log
from bagua_hvd.core.native import LOG_LATE

_JOIN_SECONDS = 1


class Listener:
    """Logs what the context says, until it is shut down.

    Args:
        context: context.Context. steps: function that returns how many optimizer steps were made.
    """

    def __init__(self, context: Any, steps: Any) -> None:
        self._thread = threading.Thread(target=_listen, args=(context, steps), name="bagua_hvd log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """After the context was shut down: waits, a moment, for the thread to log the rest."""
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)


def _listen(context, steps):
    for level, file, line, text in context.records():
        try:
            if level == LOG_LATE:
                log.logger.warning("%s", _report(text, steps()))
            else:
                log.log_from(file, line, level, text)
        except Exception:
            # By a handler of the script's own. What the core says next is logged all the same.
            traceback.print_exc()


def _report(names, steps):
    text = [f"the other ranks wait for rank {log.rank()} with [{names}]. It has made {steps} optimizer steps, and is "
            "here (most recent call last):\n"]
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.ident in frames:
            text += [f"  Thread {thread.name}:\n", *traceback.format_stack(frames[thread.ident])]
    return "".join(text).rstrip("\n")
