"""Becomes the worker's command, after arranging to be killed with the launcher.

Run as a script, without the package and its imports:
`python -I -S exec_worker.py <launcher's pid> <command> <argument>...`.
The command replaces this process, so its parent stays the launcher, and it inherits the death signal.
"""
import errno
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# The shell's exit codes.
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


def _die_with(launcher):
    """Asks the kernel to send SIGKILL when the launcher's thread that started this process ends."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass        # not Linux; the guard of processes.py remains
    if os.getppid() != launcher:        # it ended before the call
        os._exit(128 + signal.SIGKILL)


def _exec(command):
    try:
        os.execvp(command[0], command)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
    # A text file without a `#!` line: run it as a shell does, by /bin/sh.
    os.execv("/bin/sh", ["/bin/sh", *command])


def main() -> None:
    """Does not return."""
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    _die_with(launcher)
    # Python ignores these signals, and the command would inherit that.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    try:
        _exec(command)
    except OSError as error:
        sys.stderr.write(f"baguarun: cannot run {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(_NOT_FOUND if error.errno == errno.ENOENT else _NOT_EXECUTABLE)


if __name__ == "__main__":
    main()
