"""A folder with one writing process at a time."""
import fcntl
from contextlib import contextmanager


@contextmanager
def locked(folder):
    """For builds there by several processes (pytest-xdist, two developers). Creates the folder if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
