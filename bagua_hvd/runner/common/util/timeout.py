"""A deadline shared by several steps."""
import time


class TimeoutException(Exception):
    """A step did not end before the deadline."""


class Timeout:
    """The time starts at construction.

    Args:
        timeout: seconds.
        message: text of check_time_out_for()'s exception; `{activity}` and `{timeout}` in it are filled in.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._message = message
        self._end = time.monotonic() + timeout

    def remaining(self) -> float:
        """Seconds left; 0 after the deadline."""
        return max(0, self._end - time.monotonic())

    def timed_out(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """Raises TimeoutException, naming the activity, if the deadline has passed."""
        if self.timed_out():
            raise TimeoutException(self._message.format(activity=activity, timeout=self._timeout))
