"""Reads the stderr of ranks for the launcher: their reports (job/reporting.py), and their last output."""
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from bagua_hvd.job import reporting
from bagua_hvd.job.reporting import MARK
from bagua_hvd.runner.dashboard import Dashboard
from bagua_hvd.runner.job import WorkerFailed, first_cause
from bagua_hvd.runner.output import Console, LineForwarder, Sink
from bagua_hvd.runner.supervisor import Outcome

_TAIL_NBYTES = 1 << 16
_REPORT = re.compile(re.escape(MARK) + rb"(.*\n)")
_TRACEBACK = re.compile(rb"^Traceback \(most recent call last\):$", re.MULTILINE)
_GOES_ON = (b"During handling of the above exception, another exception occurred:",
            b"The above exception was the direct cause of the following exception:")
_WITHOUT_HOROVOD = b"ModuleNotFoundError: No module named 'horovod'"


class _Filter:
    """Removes reports from the stderr of a process before it reaches the forwarder."""

    def __init__(self, reports, process, rank, forwarder):
        self._reports, self._process, self._rank, self._forwarder = reports, process, rank, forwarder
        self._held = b""        # possibly the beginning of a report

    def feed(self, data):
        *parts, rest = _REPORT.split(self._held + data)         # output, report, output, report, ..., output
        for output, report in zip(parts[::2], parts[1::2], strict=True):
            self._pass_on(output)
            self._reports.take(self._process, self._rank, report)
        at = rest.rfind(MARK[:1])
        if at < 0 or not (rest[at:].startswith(MARK) or MARK.startswith(rest[at:])):
            at = len(rest)
        self._pass_on(rest[:at])
        self._held = rest[at:]

    def _pass_on(self, data):
        if data:
            self._reports.record_stderr(self._process, data)
            self._forwarder.feed(data)

    def close(self):
        self._pass_on(self._held)
        self._forwarder.close()


class Reports:
    """Reports of all processes of a job; belongs to the thread that forwards their output.

    Attributes:
        because_of: {process: rank}: the rank that failed or left the job before the process did; None: none.
    """

    def __init__(self, dashboard: Dashboard | None = None) -> None:
        self.because_of: dict[int, int | None] = {}
        self._dashboard = dashboard
        self._stderr_tail: defaultdict[int | None, bytearray] = defaultdict(bytearray)  # by process: its last output
        self._last_writer: int | None = None

    def filter(self, process: int, rank: int, forwarder: Sink) -> Sink:
        """The forwarder of a process's stderr, without the reports."""
        return _Filter(self, process, rank, forwarder)

    def take(self, process: int, rank: int, line: bytes) -> None:
        """Takes a report."""
        try:
            report = reporting.read(line)
        except ValueError:
            return
        if isinstance(report, reporting.BecauseOf):
            self.because_of[process] = report.rank
        elif self._dashboard is not None and isinstance(report, reporting.Stalled):
            self._dashboard.stall(report.rank, report.operations, report.names)
        elif self._dashboard is not None:
            self._dashboard.report(rank, report.figures)

    def record_stderr(self, process: int, data: bytes) -> None:
        """Takes output of a process to stderr."""
        self._last_writer = process
        tail = self._stderr_tail[process]
        tail += data[-_TAIL_NBYTES:]
        if len(tail) > 2 * _TAIL_NBYTES:
            del tail[:-_TAIL_NBYTES]

    def forget(self, processes: Iterable[int]) -> None:
        """Drops what ended processes wrote. Of the one that wrote last it is kept, to compare its last line."""
        for process in processes:
            self.because_of.pop(process, None)
            tail = self._stderr_tail.pop(process, bytearray())
            if process == self._last_writer:
                self._last_writer, self._stderr_tail[None] = None, tail

    def cause(self, failures: Sequence[int]) -> int | None:
        """See first_cause().

        Args:
            failures: processes in the order of their end. Their names are their ranks.
        """
        return first_cause(failures[0], {process: self.because_of.get(process) for process in failures})

    def circumstances(self, outcome: Outcome) -> str:
        """Text to append to the failure message of outcome.failed: the other ranks that explain it."""
        cause = self.because_of.get(outcome.failed)
        if cause is None:
            before = list(outcome.exit_codes)[:list(outcome.exit_codes).index(outcome.failed)]
            early = [rank for rank in before if outcome.exit_codes[rank] == 0]
            ranks = ", ".join(map(str, early))
            return f". Before that, rank {ranks} had ended with exit code 0" if early else ""
        if outcome.exit_codes.get(cause) == 0:
            return f". It needed rank {cause}, which ended with exit code 0"
        return f". It waited for rank {cause}, which did not respond" if cause not in outcome.failures else ""

    def repeat_traceback(self, console: Console, failed: WorkerFailed) -> None:
        """Repeats the traceback of the failure that caused the others as the last output, with a remedy if known."""
        text = self._buried_traceback(failed.process)
        if text:
            console.say(f"baguarun: Process {failed.rank} failed first. It had written:")
            forwarder = LineForwarder(console, failed.rank, "stderr")
            forwarder.feed(text)
            forwarder.close()
        if self._last_line(failed.process) == _WITHOUT_HOROVOD:
            console.say("baguarun: Add --as-horovod, or import bagua_hvd instead of horovod.")

    def _buried_traceback(self, process):
        """The last traceback of a process, with those that led to it, if other output to stderr followed: bytes."""
        text = bytes(self._stderr_tail[process])
        begins = [match.start() for match in _TRACEBACK.finditer(text)]
        # Output that ends with the same line is the same failure.
        if not begins or self._last_line(process) == self._last_line(self._last_writer):
            return b""
        begin = begins.pop()
        while begins and text[:begin].rstrip().endswith(_GOES_ON):
            begin = begins.pop()
        return text[begin:]

    def _last_line(self, process):
        return bytes(self._stderr_tail[process]).rstrip().rpartition(b"\n")[2]
