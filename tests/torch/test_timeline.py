"""The timeline is a Chrome trace that is valid JSON at any time."""
import json
from pathlib import Path

import pytest
import torch

import bagua_hvd.torch as hvd
from locales import make_german, use_german


def check_format(events):
    """Checks the Chrome trace format, as chrome://tracing and Perfetto read it."""
    latest = {}
    for event in events:
        assert type(event["pid"]) is int and event["ph"] in "BEXiM"
        assert event["ph"] == "E" or type(event["name"]) is str
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index") and event["args"]
            continue
        assert type(event["ts"]) in (int, float) and event["ts"] >= latest.get(event["pid"], 0)    # ordered by time
        latest[event["pid"]] = event["ts"]
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] != "i" or event["s"] == "g"


def events_of(path, n):
    events = json.loads(Path(path).read_text())
    check_format(events)
    assert events[0]["args"].keys() == {"start_time_since_epoch_in_micros"}
    names = {e["pid"]: e["args"]["name"] for e in events[1:] if e.get("name") == "process_name"}
    depth = dict.fromkeys(names, 0)
    for e in events:
        if e["ph"] in "BE":
            depth[e["pid"]] += 1 if e["ph"] == "B" else -1
            assert depth[e["pid"]] >= 0
    # Rank 1 may have posted its next barrier before rank 0 closed the file.
    assert not any(count for pid, count in depth.items() if names[pid] != "barrier")
    pid = next(pid for pid, name in names.items() if name == "allreduce.test_allreduce")
    own = [e for e in events if e["pid"] == pid and e["ph"] != "M"]
    assert [e["name"] for e in own if e["ph"] == "B"] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"] * 2
    assert sorted(e["name"] for e in own if e["ph"] == "X") == sorted(str(r) for r in range(n) for _ in range(2))
    assert own[-1]["args"]["dtype"] == "float32" and own[-1]["args"]["shape"] == "[17, 3]"
    refused = [pid for pid, name in names.items() if name == "allreduce.refused"]
    assert len(refused) == (n > 1)
    for pid in refused:
        own = [e for e in events if e["pid"] == pid and e["ph"] in "BE"]
        assert [e.get("name") for e in own] == ["NEGOTIATE_ALLREDUCE", None, "ERROR", None]
        assert own[-1]["args"]["message"].startswith("Mismatched ALLREDUCE tensor shapes: One rank")
    return events


def write_timelines(folder):
    hvd.init()
    for part in ("one", "two"):
        path = f"{folder}/{part}.json"
        hvd.start_timeline(path, mark_cycles=part == "two")
        hvd.barrier()           # all ranks have started, so that the old file has none of the operations below
        for _ in range(2):
            hvd.allreduce(torch.ones(17, 3), name="test_allreduce")
        if hvd.size() > 1:
            with pytest.raises(hvd.HorovodInternalError, match="Mismatched"):
                hvd.allreduce(torch.ones(1 + hvd.rank()), name="refused")
        hvd.start_timeline(path)        # the same file: no effect
        hvd.barrier()
        if hvd.rank() == 0:
            json.loads(Path(path).read_text())      # while it is open
        hvd.stop_timeline()
        if hvd.rank() == 0:
            events = events_of(path, hvd.size())
            assert any(e.get("name") == "CYCLE_START" for e in events) == (part == "two")
        hvd.barrier()
    hvd.stop_timeline()
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="folder.json cannot be written: No such file or directory"):
            hvd.start_timeline(f"{folder}/no/such/folder.json")
    hvd.shutdown()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.start_timeline(path)


def start_while_negotiating(path):
    hvd.init()
    if hvd.rank() == 1:
        early = hvd.allreduce_async(torch.ones(2), name="test_early")
    hvd.barrier()               # rank 1's request has arrived
    hvd.start_timeline(path)
    if hvd.rank() == 0:
        early = hvd.allreduce_async(torch.ones(2), name="test_early")
    hvd.synchronize(early)
    hvd.shutdown()              # the engine has written the end of the last event


def end_with_a_set(path):
    hvd.init(process_sets="dynamic")
    hvd.start_timeline(path)
    pair = hvd.add_process_set([0, 1])
    if hvd.rank() == 1:
        handle = hvd.allreduce_async(torch.ones(2), name="test_gone", process_set=pair)
    hvd.barrier()
    hvd.remove_process_set(pair)
    if hvd.rank() == 1:
        with pytest.raises(hvd.HorovodInternalError, match="was removed"):
            hvd.synchronize(handle)
    hvd.shutdown()


def test_negotiations_end_with_their_set(run_ranks, tmp_path):
    path = tmp_path / "timeline.json"
    run_ranks(3, end_with_a_set, arguments={"path": str(path)}, env={"HOROVOD_TIMELINE": "DYNAMIC"})
    events = json.loads(path.read_text())
    check_format(events)
    gone, = (e["pid"] for e in events[1:] if e.get("name") == "process_name" and "gone" in e["args"]["name"])
    own = [e for e in events if e["pid"] == gone and e["ph"] in "BE"]
    assert [e.get("name") for e in own] == ["NEGOTIATE_ALLREDUCE", None, "ERROR", None]
    assert "was removed" in own[-1]["args"]["message"]


def refuse_without_variable():
    hvd.init()
    with pytest.raises(ValueError, match="HOROVOD_TIMELINE"):
        hvd.start_timeline("timeline.json")


@pytest.mark.parametrize("n", [1, 2])
def test_timeline(run_ranks, tmp_path, n):
    run_ranks(n, write_timelines, arguments={"folder": str(tmp_path)}, env={"HOROVOD_TIMELINE": "DYNAMIC"})


def test_started_while_an_operation_is_negotiated(run_ranks, tmp_path):
    path = tmp_path / "timeline.json"
    run_ranks(2, start_while_negotiating, arguments={"path": str(path)}, env={"HOROVOD_TIMELINE": "DYNAMIC"})
    events = json.loads(path.read_text())
    check_format(events)
    assert [e["ph"] for e in events if e["ph"] in "BE"] == ["B", "E"] and events[-2]["name"] == "ALLREDUCE"


def test_refused_without_the_variable(run_ranks):
    run_ranks(1, refuse_without_variable)


def from_the_start(german):
    if german:
        use_german()
    hvd.init()
    hvd.allreduce(torch.ones(2), name='a "quoted" name\n')
    hvd.shutdown()


@pytest.mark.parametrize("german", [False, True])
def test_from_the_start_by_the_variable(run_ranks, tmp_path, german):
    path = tmp_path / "timeline.json"
    locale = make_german(tmp_path) if german else {}
    run_ranks(1, from_the_start, arguments={"german": german}, env={"HOROVOD_TIMELINE": str(path), **locale})
    events = json.loads(path.read_text())
    check_format(events)
    names = [e["args"]["name"] for e in events[1:] if e.get("name") == "process_name"]
    assert names == ['allreduce.a "quoted" name\n']
