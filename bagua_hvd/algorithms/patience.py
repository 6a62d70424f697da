"""How long a step waits for a round that is on its way, where nobody has said how old that may become.

Old averages cost accuracy, and waiting costs time: from the fourth step of a round on each step waits for it, but no
longer than the step itself has taken. So a late rank costs the others at most half of their speed; and nobody waits for
ever for a rank that has made its last step.
"""
import time
from collections.abc import Callable

STEPS = 4
LOOKS = 20          # in a wait


class Patience:
    """Of one rank's training. Its steps are what lies between two calls of wait_for()."""

    def __init__(self) -> None:
        self._went_on_at = time.monotonic()

    def wait_for(self, done: Callable[[], bool], steps: int) -> None:
        """Waits for what has been on its way for so many steps."""
        now = time.monotonic()
        step = now - self._went_on_at
        while steps >= STEPS and not done() and time.monotonic() < now + step:
            time.sleep(step / LOOKS)
        self._went_on_at = time.monotonic()
