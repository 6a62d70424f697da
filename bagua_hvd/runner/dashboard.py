"""`baguarun --dashboard`: a live table of the ranks below their output, drawn by rich. It shows figures of
hvd.statistics() and stalled ranks, as reported by the ranks (reports.py).
"""
import sys
import time
from collections.abc import Iterable, Sequence

from bagua_hvd.runner.common.util.hosts import SlotInfo
from bagua_hvd.runner.output import Console, TextStream

_REFRESH_PER_SECOND = 4
_MIB = 1 << 20


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

    Args:
        slots: SlotInfos of the ranks; those of an elastic job change, see reset_rank().
    Raises:
        RuntimeError: rich is not installed.
    Attributes:
        console: Console for the ranks' output above the table; only within the context.
    """

    def __init__(self, slots: Iterable[SlotInfo] = ()) -> None:
        try:
            from rich.live import Live
        except ImportError:
            raise RuntimeError("--dashboard needs rich: run `pip install rich`, or leave it out") from None
        self._ranks = {slot.rank: _Rank(slot.hostname) for slot in slots}
        self._live = Live(get_renderable=self._table, refresh_per_second=_REFRESH_PER_SECOND)

    def __enter__(self):
        self._live.__enter__()
        # rich has replaced both streams, so that their output appears above the table.
        self.console = Console(TextStream(sys.stdout), TextStream(sys.stderr))
        return self

    def __exit__(self, *exception):
        self._live.__exit__(*exception)

    def reset_rank(self, slot: SlotInfo) -> None:
        """Resets the line of a rank that another process has taken over, and drops lines of ranks beyond the size."""
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
