"""baguarun --dashboard on a pseudo terminal, and the reports that it takes out of the ranks' output."""
import json
import os
import pty
import re
import select
import sys
import time

import pytest

from bagua_hvd.job.reporting import MARK
from bagua_hvd.runner.common.util.hosts import SlotInfo
from bagua_hvd.runner.reports import Dashboard, Filter, Reports

pytest.importorskip("rich")
pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import os, sys, time
from bagua_hvd.core import objects
from bagua_hvd.job import basics as hvd
from bagua_hvd.job.statistics import Account
hvd.init()
for i in range(8):
    objects.allgather_object(hvd.context(), bytes(1 << 18), f"object.{i}")
    account = Account("Ours")
    account.renew()
    account.record.steps += 1
    time.sleep(0.4)
sys.stderr.write("no end")
"""


def plain(data):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))


def terminal_output(popen, terminal, look=lambda text: None):
    """The whole output, without control sequences. look: called with the output so far."""
    data, end = b"", time.monotonic() + 100
    while time.monotonic() < end:
        readable = select.select([terminal], [], [], 0.1)[0]
        try:
            data += os.read(terminal, 1 << 16) if readable else b""
            look(plain(data))
        except OSError:
            break       # the other end is closed
        if not readable and popen.poll() is not None:
            break
    return plain(data)


def test_on_a_terminal(launcher):
    ours, theirs = pty.openpty()
    env = {"TERM": "xterm-256color", "COLUMNS": "150", "LINES": "40"}
    popen = launcher.start("-np", 2, "--output-filename", "logs", "--dashboard", sys.executable, "-c", SCRIPT, env=env,
                           stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = terminal_output(popen, ours)
    os.close(ours)
    assert popen.wait(60) == 0
    assert "steps/s" in text and "has not submitted" in text and "bagua_hvd report" not in text
    # The last table: both ranks, eight steps of a quarter MiB each to the peer.
    for rank in (0, 1):
        row = [line for line in text.splitlines() if re.match(rf"\u2502 {rank} +\u2502 localhost ", line)][-1]
        assert float(row.split("\u2502")[6]) >= 2.0
        assert f"[{rank}]<stderr>:no end" in text
        assert (launcher.folder / "logs" / f"rank.{rank}" / "stderr").read_bytes() == b"no end"
    assert re.search(r"\u2502 +[1-9]\d*\.\d +\u2502 +\d+ % +\u2502", text)      # steps/s and waiting, while it ran


def test_of_an_elastic_job(launcher):
    discover = launcher.folder / "discover.sh"
    discover.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.2:1\n")
    discover.chmod(0o755)
    ours, theirs = pty.openpty()
    env = {"TERM": "xterm-256color", "COLUMNS": "150", "LINES": "40"}
    popen = launcher.start("--host-discovery-script", discover, "--min-np", 2, "--dashboard",
                           sys.executable, "-c", SCRIPT, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = terminal_output(popen, ours)
    os.close(ours)
    assert popen.wait(60) == 0, text
    for rank, host in enumerate(("localhost", "127.0.0.2")):
        row = [line for line in text.splitlines() if re.match(rf"\u2502 {rank} +\u2502 {host} ", line)][-1]
        assert float(row.split("\u2502")[6]) >= 1.0
        assert f"[{rank}]<stderr>:no end" in text
    assert "bagua_hvd report" not in text


def test_ranks_come_and_go():
    dashboard = Dashboard()
    for size in (2, 3, 2):
        for rank in range(size):
            dashboard.reset_rank(SlotInfo(f"h{size}.{rank}", rank, 0, rank, size, 1, size))
            dashboard.report(rank, {"steps": 1, "bytes_sent": 1, "blocked_ms": 0, "exposed_ms": 0})
    dashboard.report(2, b'{"steps": 9}')        # still in flight when the rank left
    assert {rank: line.host for rank, line in dashboard._ranks.items()} == {0: "h2.0", 1: "h2.1"}


def test_without_a_terminal(launcher):
    done = launcher.run("-np", 1, "--dashboard", "echo", "done")
    assert (done.returncode, done.stdout) == (0, "[0]<stdout>:done\n")
    assert done.stderr == "baguarun: warning: --dashboard has no effect: stdout is not a terminal\n"


class Sink:
    """A fake LineForwarder."""

    def __init__(self):
        self.data, self.closed = b"", False

    def feed(self, data):
        self.data += data

    def close(self):
        self.closed = True


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_reports_are_taken_out(size):
    dashboard, sink = Dashboard(), Sink()
    dashboard.reset_rank(SlotInfo("h", 0, 0, 0, 1, 1, 1))
    stream = Filter(Reports(dashboard), "process", 0, sink)
    facts = {"steps": 3, "bytes": 5, "blocked_ms": 0.5}
    report = MARK + json.dumps({"type": "figures", "figures": facts}).encode() + b"\n"
    data = b"a" + report + b"\0b\0\nbar 10%" + report + b"\rbar 20%" + MARK + b"no json\n" + b"end\0bagua"
    for at in range(0, len(data), size):
        stream.feed(data[at:at + size])
    stream.close()
    assert sink.data == b"a\0b\0\nbar 10%\rbar 20%end\0bagua" and sink.closed
    assert dashboard._ranks[0].facts == facts


@pytest.mark.parametrize("text", [
    "", "7", "[]", "{}", "\udc80", '{"type": "because_of", "rank": [1]}', '{"type": "because_of", "rank": "1"}',
    '{"type": "figures", "figures": {"steps": "many"}}', '{"type": "figures", "figures": [1]}',
    '{"type": "stalled", "rank": 0, "operations": 1, "names": "a"}', '{"type": "stalled", "rank": 0}', "[" * 100_000,
])
def test_no_report(text):
    dashboard = Dashboard()
    dashboard.reset_rank(SlotInfo("h", 0, 0, 0, 1, 1, 1))
    reports = Reports(dashboard)
    Filter(reports, "process", 0, Sink()).feed(MARK + text.encode(errors="surrogateescape") + b"\n")
    assert reports.because_of == {} and dashboard._ranks[0].facts == {} and dashboard._ranks[0].stalled == ""


def test_stalled_operations():
    dashboard = Dashboard()
    for rank in range(2):
        dashboard.reset_rank(SlotInfo("h", rank, 0, 0, 2, 1, 2))
    stream = Filter(Reports(dashboard), "process", 0, Sink())

    def report(**fields):
        stream.feed(MARK + json.dumps({"type": "stalled", **fields}).encode() + b"\n")
        return [dashboard._ranks[rank].stalled for rank in range(2)]

    assert report(rank=1, operations=2, names=["a [b], c", "d"]) == ["", "a [b], c, d"]
    assert report(rank=9, operations=1, names=["x"]) == ["", "a [b], c, d"]         # no rank has this number
    assert report(rank=1, operations="?") == ["", "a [b], c, d"]
    assert report(rank=1, operations=7, names=["a"]) == ["", "a ..."]
    assert report(rank=1, operations=0, names=[]) == ["", ""]
    stream.feed(b"1: [what a script prints]\n")
    assert dashboard._ranks[1].stalled == ""


LATE = """
import os, time
from bagua_hvd.core import objects
from bagua_hvd.job import basics as hvd
hvd.init()
if hvd.rank() == 1:
    while not os.path.exists("seen"):
        time.sleep(0.1)
objects.allgather_object(hvd.context(), "x", "late,[1]")
time.sleep(3)       # two reports, of which the first may have been under way
"""


def test_a_stall_comes_and_goes(launcher):
    ours, theirs = pty.openpty()
    env = {"TERM": "xterm-256color", "COLUMNS": "220", "LINES": "40", "HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    popen = launcher.start("-np", 2, "--dashboard", sys.executable, "-c", LATE, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    row, seen = re.compile(r"\u2502 1 +\u2502 localhost .*"), launcher.folder / "seen"
    text = terminal_output(popen, ours, lambda text: "late,[1]" in "".join(row.findall(text)) and seen.touch())
    os.close(ours)
    assert popen.wait(60) == 0
    assert seen.exists() and "late,[1]" not in row.findall(text)[-1]
