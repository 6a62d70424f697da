"""Runs a shell command such that nothing of it is left behind."""
import signal
import sys

from bagua_hvd.runner.output import Console, LineForwarder, TextStream
from bagua_hvd.runner.supervisor import GRACE_SECONDS, Supervisor, Task

GRACEFUL_TERMINATION_TIME_S = GRACE_SECONDS


def execute(command, env=None, stdout=None, stderr=None, index=None, events=None, prefix_output_with_timestamp=False):
    """Runs the command by /bin/sh, forwards its output, and returns its exit code, 128 + n when signal n ended it.

    When it returns or raises (KeyboardInterrupt, say), all processes of the command have ended, background ones too.

    Args:
        command: text for the shell, or a list of arguments that needs none.
        env: the whole environment; None: this process's.
        stdout, stderr: text streams; None: sys.stdout, sys.stderr.
        index: the rank for the prefix `[rank]<stdout>:`; None: no prefix.
        events: threading.Events; when one is set, the command is stopped, SIGTERM first, SIGKILL after 5 s.
        prefix_output_with_timestamp: local time before the prefix.
    """
    console = Console(TextStream(stdout or sys.stdout), TextStream(stderr or sys.stderr))
    out, err = (LineForwarder(console, index, stream, prefix_output_with_timestamp) for stream in ("stdout", "stderr"))
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    should_stop = (lambda: any(event.is_set() for event in events)) if events else None
    supervisor = Supervisor(console, should_stop, handle_signals=False, report_failures=False)
    outcome = supervisor.run([Task(0, argv, env, out, err)])
    return outcome.exit_codes.get(0, 128 + signal.SIGKILL)
