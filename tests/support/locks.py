"""A folder that one process at a time writes to."""
import fcntl
from contextlib import contextmanager


@contextmanager
def locked(folder):
    """For what is built there (pytest-xdist, two developers). The folder is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
