"""Becomes the worker's command, after arranging to be killed with the launcher.

Run as a script, without the package and its imports:
`python -I -S exec_worker.py <launcher's pid> <command> <argument>...`.
The command keeps this process: its parent stays the launcher, and it has the death signal itself.
"""
import errno
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# The shell's codes.
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


def _die_with(launcher):
    """Asks the kernel for SIGKILL when the launcher's thread that started us ends."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass        # not Linux; the guard of processes.py remains
    if os.getppid() != launcher:        # it was gone before the kernel knew
        os._exit(128 + signal.SIGKILL)


def _exec(command):
    try:
        os.execvp(command[0], command)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
    # Executable text without a `#!` line: a shell runs it, so we do.
    os.execv("/bin/sh", ["/bin/sh", *command])


def main():
    """Does not return."""
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    _die_with(launcher)
    # Ignored by Python, which the command would inherit.
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
