"""Exposed communication, from the timeline: the time of a step in which gradients are in flight and their rank waits.

The timeline has the times when each bucket was negotiated and reduced; a Watch has the times when the front end only
waited for them. Their intersection is exposed: communication that no computation hides.
"""
import json
import time
from contextlib import contextmanager
from pathlib import Path

from bagua_hvd.job import basics


class Watch:
    """Records when Reducers synchronize, on the clock of the timeline.

    Attributes:
        windows: (begin, end) in microseconds since the epoch.
    """

    def __init__(self, reducers):
        self.windows = []
        for reducer in reducers:
            reducer.synchronize = self._watched(reducer.synchronize)

    def _watched(self, synchronize):
        def watched():
            began = time.time_ns()
            try:
                synchronize()
            finally:
                self.windows.append((began / 1e3, time.time_ns() / 1e3))

        return watched


def bars(events):
    """When a timeline's gradient buckets were negotiated or reduced: (begin, end) as in Watch.windows."""
    origin = events[0]["args"]["start_time_since_epoch_in_micros"]
    buckets, found = set(), []
    open_bars: dict[int, list[float]] = {}
    for event in events[1:]:
        pid = event["pid"]
        if event["ph"] == "M" and event["name"] == "process_name" and "gradients." in event["args"]["name"]:
            buckets.add(pid)
        elif pid in buckets and event["ph"] == "B":
            open_bars.setdefault(pid, []).append(event["ts"])
        elif pid in buckets and event["ph"] == "E":
            began = open_bars[pid].pop()
            if not open_bars[pid]:
                found.append((origin + began, origin + event["ts"]))
    return found


def union(intervals):
    """The union as disjoint intervals in rising order."""
    result: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result


def overlap(a, b):
    """The total length of the intersection of `a` and `b`."""
    a, b, i, j, total = union(a), union(b), 0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


@contextmanager
def timeline(path):
    """Records a timeline on all ranks within this context. At its end, rank 0's list, which it yields, has the events.

    Needs HOROVOD_TIMELINE=DYNAMIC in the ranks' environment.
    """
    basics.start_timeline(str(path))
    events: list[dict] = []
    try:
        yield events
    finally:
        basics.stop_timeline()
        if basics.rank() == 0:
            events.extend(json.loads(Path(path).read_text()))
