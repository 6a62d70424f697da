"""Whole jobs of plain workers: ranks are lost, hosts join and leave, and no committed step is lost."""
from pathlib import Path

from elastic_job import with_rank
from launcher import wait_until

WORKER = [Path(__file__).with_name("plain_worker.py")]
A, B, C = "localhost", "127.0.0.2", "127.0.0.3"


def places(events):
    """{rank: (local, cross)}."""
    return {int(event.words["rank"]): (event.words["local"], event.words["cross"]) for event in events}


def pids(events):
    """{rank: pid}."""
    return {int(event.words["rank"]): event.words["pid"] for event in events}


def step(events):
    """The step at which all of them began."""
    steps = {int(event.words["step"]) for event in events}
    assert len(steps) == 1
    return steps.pop()


def train(job, size):
    """Waits until the ranks of a job of this size have committed some steps."""
    begin = step(job.wait_for("enter", size, size=size)[-size:])
    job.wait_for("committed", 1, step=begin + 3)


def ends_with(job, size):
    """All ranks of the last rendezvous end after the same step."""
    assert job.finish() == 0, job.text
    done = job.of("done")
    assert {event.words["size"] for event in done} == {str(size)} and len(done) == size, job.text
    assert step(done) >= job.committed()


def test_without_changes(make_job):
    job = make_job({A: 2, B: 1})
    job.start("--min-np", 2, "--max-np", 3, command=WORKER)
    train(job, 3)
    ends_with(job, 3)
    assert places(job.of("enter")) == {0: ("0/2", "0/2"), 1: ("1/2", "0/1"), 2: ("0/1", "1/2")}
    assert {event.words["pair"] for event in job.of("enter")} == {"True"}
    assert all(event.source == int(event.words["rank"]) for event in job.events if "rank" in event.words)


def test_survivors_keep_the_rate_of_the_network(make_job):
    job = make_job({A: 1, B: 1, C: 1})
    job.start("--min-np", 1, "--max-np", 3, command=WORKER, env={"BAGUA_HVD_TRANSPORT": "tcp"})
    train(job, 3)
    first = job.of("enter", size=3)
    job.kill(with_rank(first, 1))
    rates = {event.words["rate"] for event in first + job.wait_for("enter", 2, size=2)}
    assert len(rates) == 1 and rates != {"0.0"}
    ends_with(job, 2)


def test_a_worker_ends_between_two_meetings(make_job):
    """It ends after it got its assignment, before the others could connect: they do not wait for it."""
    job = make_job({A: 1, B: 1, C: 1})
    job.start("--min-np", 1, "--log-level", "INFO", command=WORKER, env={"TEST_FAULT": f"assigned {C}"})
    train(job, 3)
    job.kill(with_rank(job.of("enter", size=3), 1))
    job.wait_for("enter", size=1)
    sentence = "rank 1 of 2 has ended, with exit code 9, and did not call init() (scope elastic.2)"
    wait_until(lambda: sentence in job.text)        # stderr, while the line before is from stdout
    ends_with(job, 1)


def test_a_worker_is_killed_and_another_one_comes(make_job):
    job = make_job({A: 1, B: 1})
    job.start("-np", 2, "--min-np", 1, "--max-np", 2, command=WORKER)
    train(job, 2)
    first = job.of("enter", size=2)
    committed = job.committed()
    job.kill(with_rank(first, 1))
    alone = job.wait_for("enter", size=1)
    assert pids(alone)[0] == pids(first)[0]
    assert step(alone) >= committed
    train(job, 1)
    # B is blacklisted: a new host replaces it.
    job.set_hosts({A: 1, B: 1, C: 1})
    together = job.wait_for("enter", 4, size=2)[2:]
    assert pids(together)[0] == pids(first)[0]
    assert step(together) > step(alone)
    ends_with(job, 2)
    assert f"a worker on {B} ended with exit code 137: the host is blacklisted" in job.text
    # Adding a process set with all ranks returns the existing one.
    assert {event.words["pair"] for event in job.of("enter")} == {"False"}


def test_rank_0_is_lost(make_job):
    job = make_job({A: 1, B: 2})
    job.start("--min-np", 2, command=WORKER)
    train(job, 3)
    first = job.of("enter", size=3)
    committed = job.committed()
    job.kill(with_rank(first, 0))
    second = job.wait_for("enter", 2, size=2)
    assert pids(second) == {0: pids(first)[1], 1: pids(first)[2]}
    assert places(second) == {0: ("0/2", "0/1"), 1: ("1/2", "0/1")}
    assert step(second) >= committed
    train(job, 2)
    ends_with(job, 2)
    assert {event.words["pair"] for event in first} == {"True"}
    assert {event.words["pair"] for event in second} == {"False"}


def test_a_host_is_added_and_another_one_removed(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 1, command=WORKER)
    train(job, 2)
    job.set_hosts({C: 2, A: 1, B: 1})       # existing hosts come first in any case
    train(job, 4)
    four = job.of("enter", size=4)
    assert places(four) == {0: ("0/1", "0/3"), 1: ("0/1", "1/3"), 2: ("0/2", "2/3"), 3: ("1/2", "0/1")}
    assert {event.words["pair"] for event in four} == {"True"}
    job.set_hosts({C: 2, B: 1})
    train(job, 3)
    three = job.of("enter", size=3)
    assert pids(three) == {0: pids(four)[1], 1: pids(four)[2], 2: pids(four)[3]}
    ends_with(job, 3)
    # The process on A got a message, and left without an error.
    assert "this process has been removed from elastic job: localhost has no slot for it any more" in job.text
    assert "blacklisted" not in job.text


def test_a_new_worker_that_cannot_start_disturbs_nobody(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 2, command=WORKER, env={"TEST_FAULT": f"start {C}"})
    train(job, 2)
    job.set_hosts({A: 1, B: 1, C: 1})
    job.wait_for_text(f"a worker on {C} ended with exit code 3: the host is blacklisted")
    ends_with(job, 2)
    assert len(job.of("enter")) == 2


def test_a_new_worker_that_hangs_after_init_is_killed(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 2, "--elastic-timeout", 3, command=WORKER, env={"TEST_FAULT": f"hang {C}"})
    train(job, 2)
    job.set_hosts({A: 1, B: 1, C: 1})
    job.wait_for("up", 1, size=3)
    job.wait_for_text(f"a worker on {C} has not synchronized its state 3 s after init(), and was killed: the host is")
    assert step(job.wait_for("enter", 4, size=2)[2:]) >= 3
    ends_with(job, 2)


def test_a_new_worker_that_begins_with_a_collective_fails_alone(make_job):
    """Scripts that are not elastic begin with a broadcast of parameters; the other ranks do not take part."""
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 2, command=WORKER, env={"TEST_FAULT": f"collective {C}"})
    train(job, 2)
    job.set_hosts({A: 1, B: 1, C: 1})
    job.wait_for_text(f"a worker on {C} ended with exit code 1: the host is blacklisted")
    assert step(job.wait_for("enter", 4, size=2)[2:]) >= 3
    ends_with(job, 2)
    assert "this process has joined a running elastic job" in job.text


def test_a_broken_connection_to_the_driver_is_made_anew(make_job):
    """Rank 0's connection, which announces new hosts."""
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 2, command=WORKER, env={"TEST_FAULT": "cut"})
    job.wait_for("committed", 2, step=8)
    job.set_hosts({A: 1, B: 1, C: 1})
    train(job, 3)
    ends_with(job, 3)
    assert pids(job.of("enter", size=3))[0] == pids(job.of("enter", size=2))[0]


def test_a_new_worker_whose_connection_is_broken_while_it_synchronizes(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 2, "--elastic-timeout", 3, command=WORKER, env={"TEST_FAULT": f"cut {C}"})
    train(job, 2)
    job.set_hosts({A: 1, B: 1, C: 1})
    begun = max(float(event.words["at"]) for event in job.wait_for("enter", 3, size=3))
    wait_until(lambda: float(job.of("committed")[-1].words["at"]) > begun + 6)
    ends_with(job, 3)
    assert len(job.of("enter")) == 5


def test_a_host_comes_back_after_its_cooldown(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 1, "--blacklist-cooldown-range", 1, 2, command=WORKER)
    train(job, 2)
    first = job.of("enter")
    job.kill(with_rank(first, 0))
    job.wait_for("enter", size=1)
    again = job.wait_for("enter", 4, size=2)[2:]
    # The failed host now comes last.
    assert pids(again)[0] == pids(first)[1]
    ends_with(job, 2)


def test_fixed_hosts_give_fault_tolerance_without_discovery(make_job):
    job = make_job({})
    job.start("-np", 2, "--min-np", 1, "-H", f"{A}:1,{B}:1", command=WORKER, script=False)
    train(job, 2)
    job.kill(job.of("enter")[1])
    train(job, 1)
    ends_with(job, 1)


def test_discovery_that_fails_later_changes_nothing(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 2, command=WORKER)
    train(job, 2)
    job.set_hosts(None)
    job.wait_for_text("keeping the current hosts")
    ends_with(job, 2)
    assert job.text.count("keeping the current hosts") == 1
    assert len(job.of("enter")) == 2


def test_hosts_that_vanish_and_return_lose_nothing(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 2, command=WORKER)
    train(job, 2)
    first = job.of("enter")
    committed = job.committed()
    job.set_hosts({A: 1})       # too few slots: both wait
    job.wait_for_text("waiting for slots: 2 needed, 1 available")
    job.set_hosts({A: 1, B: 1})
    job.wait_for("enter", 4)
    train(job, 2)
    assert pids(job.of("enter")[-2:]) == pids(first)
    assert step(job.of("enter")[-2:]) >= committed
    ends_with(job, 2)
