"""What a rank tells `baguarun --dashboard`: a line of its stderr once a second, which the launcher takes out again.

The line begins with a zero byte, so no text of the script's is mistaken for one. It goes the way of all output: a pipe
on the launcher's host, ssh from others.
"""
import json
import os
import threading

VARIABLE = "BAGUA_HVD_DASHBOARD"     # set by the launcher
MARK = b"\0bagua_hvd report "
_PERIOD_SECONDS = 1


class Reporter:
    """Reports from construction to close(), in a thread of its own.

    Args:
        facts: function without arguments that returns numbers, by name: sums since the beginning.
    """

    def __init__(self, facts):
        self._facts = facts
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bagua_hvd reports", daemon=True)
        self._thread.start()

    def _run(self):
        while not self._stop.wait(_PERIOD_SECONDS):
            self._report()

    def _report(self):
        try:
            # One write of less than a pipe's atomic size: it does not mix with what other threads write.
            os.write(2, MARK + json.dumps(self._facts()).encode() + b"\n")
        except OSError:
            pass        # nobody reads stderr

    def close(self):
        """Reports once more, and ends the thread. Does nothing in a forked child, which has none."""
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join()
        self._report()


def start(facts):
    """A Reporter, if the launcher asked for one; else None."""
    return Reporter(facts) if os.environ.get(VARIABLE) == "1" else None
