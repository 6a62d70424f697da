"""Runs a shell command without leaving processes behind."""
import signal
import sys
import threading
from collections.abc import Collection, Sequence
from typing import TextIO

from bagua_hvd.runner.output import Console, LineForwarder, TextStream
from bagua_hvd.runner.supervisor import Supervisor, Task


def execute(command: str | Sequence[str], env: dict[str, str] | None = None, stdout: TextIO | None = None,
            stderr: TextIO | None = None, index: int | None = None, events: Collection[threading.Event] | None = None,
            prefix_output_with_timestamp: bool = False) -> int:
    """Runs the command by /bin/sh, forwards its output, and returns its exit code: 128 + n if signal n ended it.

    When it returns or raises (for instance KeyboardInterrupt), all processes of the command have ended, including
    background ones.

    Args:
        command: text for the shell, or a list of arguments that is run without a shell.
        env: the whole environment; None: this process's.
        stdout, stderr: text streams; None: sys.stdout, sys.stderr.
        index: the rank for the prefix `[rank]<stdout>:`; None: no prefix.
        events: threading.Events; when one is set, the command is stopped: SIGTERM, and after 5 s SIGKILL.
        prefix_output_with_timestamp: local time before the prefix.
    """
    console = Console(TextStream(stdout or sys.stdout), TextStream(stderr or sys.stderr))
    out, err = (LineForwarder(console, index, stream, prefix_output_with_timestamp) for stream in ("stdout", "stderr"))
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    should_stop = (lambda: any(event.is_set() for event in events)) if events else None
    supervisor = Supervisor(console, should_stop, handle_signals=False, report_failures=False)
    outcome = supervisor.run([Task(0, argv, env, out, err)])
    return outcome.exit_codes.get(0, 128 + signal.SIGKILL)
