"""A deadline that several steps share."""
import time


class TimeoutException(Exception):
    """A step did not end before the deadline."""


class Timeout:
    """Starts to run when created.

    Args:
        timeout: seconds.
        message: what check_time_out_for says; `{activity}` and `{timeout}` in it are filled in.
    """

    def __init__(self, timeout, message):
        self._timeout = timeout
        self._message = message
        self._end = time.monotonic() + timeout

    def remaining(self):
        """Seconds left, 0 when it is over."""
        return max(0, self._end - time.monotonic())

    def timed_out(self):
        """Whether the time is over."""
        return time.monotonic() > self._end

    def check_time_out_for(self, activity):
        """TimeoutException, naming the activity, when the time is over."""
        if self.timed_out():
            raise TimeoutException(self._message.format(activity=activity, timeout=self._timeout))
