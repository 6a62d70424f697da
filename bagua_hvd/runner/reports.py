"""Reads the stderr of ranks for the launcher: their reports (job/reporting.py), and their last output.

The reports say which rank caused a failure. With `baguarun --dashboard` they also fill a live table of the ranks below
their output, drawn by rich: figures of hvd.statistics(), and stalled ranks.
"""
import re
import sys
import time
from collections.abc import Mapping, Sequence

from bagua_hvd.job import reporting
from bagua_hvd.job.reporting import MARK
from bagua_hvd.runner.common.util.hosts import SlotInfo
from bagua_hvd.runner.output import Console, LineForwarder, TextStream
from bagua_hvd.runner.supervisor import Outcome

_REFRESH_PER_SECOND = 4
_MIB = 1 << 20
_TAIL_NBYTES = 1 << 15
_ALL_TAILS_NBYTES = 32 << 20        # elastic jobs restart workers for weeks
_REPORT = re.compile(re.escape(MARK) + rb"(.*\n)")
_TRACEBACK = re.compile(rb"^Traceback \(most recent call last\):$", re.MULTILINE)
_GOES_ON = (b"During handling of the above exception, another exception occurred:",
            b"The above exception was the direct cause of the following exception:")
_WITHOUT_HOROVOD = b"ModuleNotFoundError: No module named 'horovod'"


class _Rank:
    """The last two reports of a rank."""

    def __init__(self, host):
        self.host = host
        self.facts: dict[str, float] = {}
        self.rates: dict[str, float] = {}
        self.stalled = ""
        self._when = 0.0

    def update(self, facts):
        now = time.monotonic()
        if self.facts and now > self._when:
            self.rates = {name: (value - self.facts.get(name, 0)) / (now - self._when) for name, value in facts.items()}
        self.facts, self._when = facts, now


class Dashboard:
    """The table, from entering to leaving it.

    Raises:
        RuntimeError: rich is not installed.
    Attributes:
        console: Console for the ranks' output above the table; only within the context.
    """

    def __init__(self) -> None:
        try:
            from rich.live import Live
        except ImportError:
            raise RuntimeError("--dashboard needs rich: run `pip install rich`, or leave it out") from None
        self._ranks: dict[int, _Rank] = {}
        self._live = Live(get_renderable=self._table, refresh_per_second=_REFRESH_PER_SECOND)

    def __enter__(self):
        self._live.__enter__()
        # rich has replaced both streams, so that their output appears above the table.
        self.console = Console(TextStream(sys.stdout), TextStream(sys.stderr))
        return self

    def __exit__(self, *exception):
        self._live.__exit__(*exception)

    def reset_rank(self, slot: SlotInfo) -> None:
        """Begins the line of a rank, which another process may have taken over; drops lines beyond the size."""
        ranks = {rank: line for rank, line in self._ranks.items() if rank < slot.size}
        self._ranks = {**ranks, slot.rank: _Rank(slot.hostname)}

    def report(self, rank: int, facts: dict[str, float]) -> None:
        """Takes a report."""
        if line := self._ranks.get(rank):       # else the rank no longer exists; another thread may change them
            line.update(facts)

    def stall(self, rank: int, operations: int, names: Sequence[str]) -> None:
        """Takes the number of operations that others wait for and this rank has not requested, and the first names."""
        if line := self._ranks.get(rank):
            line.stalled = ", ".join(names) + (" ..." if operations > len(names) else "")

    def _table(self):
        from rich.table import Table
        from rich.text import Text

        table = Table("rank", "host", "steps/s", "waiting", "MiB/s sent", "MiB sent", "exposed ms/step",
                      "others waited", "has not submitted")
        first = self._ranks[0].facts if 0 in self._ranks else {}           # only rank 0 knows who was waited for
        for number, rank in sorted(self._ranks.items()):
            facts, rates = rank.facts, rank.rates
            table.add_row(
                str(number), rank.host,
                f"{rates['steps']:.1f}" if rates.get("steps") else "",
                f"{rates['blocked_ms'] / 10:.0f} %" if "blocked_ms" in rates else "",
                f"{rates['bytes_sent'] / _MIB:.2f}" if "bytes_sent" in rates else "",
                f"{facts['bytes_sent'] / _MIB:.2f}" if facts else "",
                f"{facts['exposed_ms'] / facts['steps']:.1f}" if facts.get("steps") else "",
                f"{first.get(f'waited_for/{number}/waited_ms', 0) / 1000:.1f} s" if first else "", Text(rank.stalled))
        return table


def first_cause(first: int | None, because_of: Mapping[int | None, int | None]) -> int | None:
    """Follows the causes from `first` to a failed process whose cause has not failed; in a cycle, returns `first`.

    Args:
        first: the first one known to have failed; others may have failed before.
        because_of: {failed process: the process that made it fail, or None}.
    """
    cause, seen = first, set()
    while because_of[cause] in because_of:
        if cause in seen:
            return first
        seen.add(cause)
        cause = because_of[cause]
    return cause


class Filter:
    """Removes reports from the stderr of a process before it reaches the forwarder."""

    def __init__(self, reports, process, rank, forwarder):
        self._reports, self._process, self._rank, self._forwarder = reports, process, rank, forwarder
        self._held = b""        # possibly the beginning of a report

    def feed(self, data: bytes) -> None:
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

    def close(self) -> None:
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
        self._stderr_tail: dict[int, bytearray] = {}        # by process, the last writer last: its last output
        self._tails_nbytes = 0

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
        tail = self._stderr_tail.pop(process, bytearray())
        self._tails_nbytes -= len(tail)
        tail += data[-_TAIL_NBYTES:]
        if len(tail) > 2 * _TAIL_NBYTES:
            del tail[:-_TAIL_NBYTES]
        self._stderr_tail[process] = tail
        self._tails_nbytes += len(tail)
        while self._tails_nbytes > _ALL_TAILS_NBYTES:
            self._tails_nbytes -= len(self._stderr_tail.pop(next(iter(self._stderr_tail))))

    def cause(self, failures: Sequence[int]) -> int | None:
        """See first_cause(). failures: processes in the order of their end. Their names are their ranks."""
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

    def repeat_traceback(self, console: Console, rank: int, process: int) -> None:
        """Repeats the traceback of the failure that caused the others as the last output, with a remedy if known."""
        text = self._buried_traceback(process)
        if text:
            console.say(f"baguarun: Process {rank} failed first. It had written:")
            forwarder = LineForwarder(console, rank, "stderr")
            forwarder.feed(text)
            forwarder.close()
        if self._last_line(process) == _WITHOUT_HOROVOD:
            console.say("baguarun: Add --as-horovod, or import bagua_hvd instead of horovod.")

    def _buried_traceback(self, process):
        """The last traceback of a process, with those that led to it, if other output to stderr followed: bytes."""
        text = bytes(self._stderr_tail.get(process, b""))
        begins = [match.start() for match in _TRACEBACK.finditer(text)]
        # Output that ends with the same line is the same failure.
        if not begins or self._last_line(process) == self._last_line(next(reversed(self._stderr_tail))):
            return b""
        begin = begins.pop()
        while begins and text[:begin].rstrip().endswith(_GOES_ON):
            begin = begins.pop()
        return text[begin:]

    def _last_line(self, process):
        return bytes(self._stderr_tail.get(process, b"")).rstrip().rpartition(b"\n")[2]
