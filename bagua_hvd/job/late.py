"""Says where this rank is when the others wait for it: the stall check (native/core/stall.c) tells it that they do."""
import sys
import threading
import traceback

_JOIN_SECONDS = 1


class Watch:
    """Prints a report to stderr whenever this rank is late, until the context is shut down.

    Args:
        context: context.Context. rank: its number.
        steps: function that returns how many optimizer steps were made.
    """

    def __init__(self, context, rank, steps):
        self._thread = threading.Thread(target=_watch, args=(context, rank, steps), name="bagua_hvd late", daemon=True)
        self._thread.start()

    def close(self):
        """After the context was shut down: waits, a moment, for the thread."""
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)


def _watch(context, rank, steps):
    for names in context.late():
        try:
            # In one piece, so that the lines stay together.
            sys.stderr.write(_report(rank, names, steps()))
            sys.stderr.flush()
        except (OSError, ValueError):       # a full disk, a closed file: the next report may fit
            pass


def _report(rank, names, steps):
    text = [f"bagua_hvd: the other ranks wait for rank {rank} with [{names}]. It has made {steps} optimizer steps, and "
            "is here (most recent call last):\n"]
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.ident in frames:
            text += [f"  Thread {thread.name}:\n", *traceback.format_stack(frames[thread.ident])]
    return "".join(text)
