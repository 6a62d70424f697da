"""Whole jobs of plain workers: ranks are lost, hosts come and go, and not a committed step is lost."""
from pathlib import Path

WORKER = Path(__file__).with_name("plain_worker.py")
A, B, C = "localhost", "127.0.0.2", "127.0.0.3"


def command(steps, seconds=0.02):
    return [WORKER, steps, seconds]


def places(events):
    """{rank: (local, cross)}."""
    return {int(event.words["rank"]): (event.words["local"], event.words["cross"]) for event in events}


def test_without_changes(make_job):
    job = make_job({A: 2, B: 1})
    job.start("--min-np", 2, "--max-np", 3, command=command(20))
    assert job.finish() == 0
    assert places(job.of("enter")) == {0: ("0/2", "0/2"), 1: ("1/2", "0/1"), 2: ("0/1", "1/2")}
    assert len(job.of("done", step=20, size=3)) == 3
    assert all(event.source == int(event.words["rank"]) for event in job.events)


def test_a_worker_is_killed_and_another_one_comes(make_job):
    job = make_job({A: 1, B: 1})
    job.start("-np", 2, "--min-np", 1, "--max-np", 2, command=command(150))
    first = job.wait_for("enter", 2)
    job.kill(next(event for event in first if event.words["rank"] == "1"))
    alone = job.wait_for("enter", size=1)[0]
    assert alone.words["pid"] == next(event.words["pid"] for event in first if event.words["rank"] == "0")
    # B is blacklisted: a new host takes its place.
    job.set_hosts({A: 1, B: 1, C: 1})
    together = job.wait_for("enter", 4, size=2)[2:]
    assert {event.words["step"] for event in together} == {together[0].words["step"]}
    assert job.finish() == 0
    assert len(job.of("done", step=150, size=2)) == 2
    assert f"a worker on {B} ended with exit code 137: the host is blacklisted" in job.text
    assert [event.words["pair"] for event in job.of("enter", size=2)] == ["False"] * 4


def test_rank_0_is_lost(make_job):
    job = make_job({A: 1, B: 2})
    job.start("--min-np", 2, command=command(100))
    first = job.wait_for("enter", 3, size=3)
    by_rank = {event.words["rank"]: event for event in first}
    job.kill(by_rank["0"])
    second = job.wait_for("enter", 2, size=2)
    assert {event.words["rank"]: event.words["pid"] for event in second} == {
        "0": by_rank["1"].words["pid"], "1": by_rank["2"].words["pid"]}
    assert places(second) == {0: ("0/2", "0/1"), 1: ("1/2", "0/1")}
    # Both had committed the same steps, and go on from there.
    steps = {event.words["step"] for event in second}
    assert len(steps) == 1 and steps != {"100"}
    assert job.finish() == 0
    assert len(job.of("done", step=100, size=2)) == 2
    # All of three ranks; of two ranks it would be the set of all.
    assert {event.words["pair"] for event in first} == {"True"}
    assert {event.words["pair"] for event in second} == {"False"}


def test_a_host_is_added_and_another_one_removed(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 1, command=command(200))
    job.wait_for("enter", 2, size=2)
    job.set_hosts({C: 2, A: 1, B: 1})       # its place in the list does not matter: old hosts come first
    four = job.wait_for("enter", 4, size=4)
    assert places(four) == {0: ("0/1", "0/3"), 1: ("0/1", "1/3"), 2: ("0/2", "2/3"), 3: ("1/2", "0/1")}
    assert len({event.words["step"] for event in four}) == 1
    assert {event.words["pair"] for event in four} == {"True"}
    job.set_hosts({C: 2, B: 1})
    three = job.wait_for("enter", 3, size=3)
    by_rank = {event.words["rank"]: event.words["pid"] for event in four}
    assert {event.words["rank"]: event.words["pid"] for event in three} == {
        "0": by_rank["1"], "1": by_rank["2"], "2": by_rank["3"]}
    assert job.finish() == 0
    assert len(job.of("done", step=200, size=3)) == 3
    # The process on A was told, and left without an error.
    assert "this process has been removed from elastic job: localhost has no slot for it any more" in job.text
    assert "blacklisted" not in job.text
    # Nobody lost a step: nothing failed.
    assert int(three[0].words["step"]) > int(four[0].words["step"])


def test_a_new_worker_that_cannot_start_disturbs_nobody(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 2, command=command(150), env={"TEST_FAULT": f"start {C}"})
    job.wait_for("enter", 2)
    job.set_hosts({A: 1, B: 1, C: 1})
    assert job.finish() == 0
    assert f"a worker on {C} ended with exit code 3: the host is blacklisted" in job.text
    assert len(job.of("enter")) == 2 and len(job.of("done", step=150)) == 2


def test_a_host_comes_back_after_its_cooldown(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 1, "--blacklist-cooldown-range", 1, 2, command=command(250))
    first = job.wait_for("enter", 2, size=2)
    job.kill(next(event for event in first if event.words["rank"] == "0"))
    job.wait_for("enter", size=1)
    again = job.wait_for("enter", 4, size=2)[2:]
    # The host that failed is the last one now.
    survivor = next(event.words["pid"] for event in first if event.words["rank"] == "1")
    assert next(event.words["pid"] for event in again if event.words["rank"] == "0") == survivor
    assert job.finish() == 0
    assert len(job.of("done", step=250, size=2)) == 2


def test_fixed_hosts_give_fault_tolerance_without_discovery(make_job):
    job = make_job({})
    job.start("-np", 2, "--min-np", 1, "-H", f"{A}:1,{B}:1", command=command(60), script=False)
    first = job.wait_for("enter", 2, size=2)
    job.kill(first[1])
    assert job.finish() == 0
    assert len(job.of("done", step=60, size=1)) == 1


def test_discovery_that_fails_later_changes_nothing(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 2, command=command(150))
    job.wait_for("enter", 2)
    job.set_hosts(None)
    assert job.finish() == 0
    assert job.text.count("the hosts stay as they were") == 1
    assert len(job.of("enter")) == 2
