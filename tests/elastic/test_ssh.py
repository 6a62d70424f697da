"""Elastic jobs on hosts that are reached by ssh."""
import os
import signal
from pathlib import Path

from elastic_job import with_rank

WORKER = [Path(__file__).with_name("plain_worker.py")]


def test_hosts_come_and_go(make_job, ssh_hosts):
    job = make_job({"localhost": 1, "far1": 1})
    job.start("--min-np", 1, command=WORKER, env=ssh_hosts.environment)
    first = job.wait_for("enter", 2, size=2)
    job.wait_for("committed", 2)
    job.set_hosts({"localhost": 1, "far1": 1, "far2": 1})
    three = job.wait_for("enter", 3, size=3)
    committed = job.committed()
    job.kill(with_rank(three, 0))
    two = job.wait_for("enter", 4, size=2)[2:]
    assert {event.words["pid"] for event in two} == {
        event.words["pid"] for event in three if event.words["rank"] != "0"}
    assert all(int(event.words["step"]) >= committed for event in two)
    assert next(event.words["pid"] for event in two if event.words["rank"] == "0") == next(
        event.words["pid"] for event in first if event.words["rank"] == "1")
    assert job.finish() == 0
    assert len(job.of("done", size=2)) == 2


def test_a_host_that_cannot_be_reached(make_job, ssh_hosts):
    job = make_job({"localhost": 1, "elsewhere.invalid": 1})
    job.start("-np", 2, "--min-np", 1, "--start-timeout", 5, command=WORKER, env=ssh_hosts.environment)
    job.wait_for_text("a worker on elsewhere.invalid ended with exit code 255")
    job.wait_for("committed", 2)
    assert job.finish() == 0
    assert "host elsewhere.invalid cannot be reached" in job.text


def test_a_new_host_does_not_suffer_from_one_that_is_silent(make_job, fake_ssh):
    job = make_job({"localhost": 1, "far1": 1})
    job.start("--min-np", 1, "--start-timeout", 8, command=WORKER, env=fake_ssh.environment)
    job.wait_for("committed", 2)
    agent = fake_ssh.agent("far1")
    os.kill(agent, signal.SIGSTOP)
    try:
        job.set_hosts({"localhost": 1, "far1": 1, "far2": 1})
        job.wait_for("enter", 2, size=3)        # the ranks of localhost and far2, for far1 tells nothing
    finally:
        os.kill(agent, signal.SIGCONT)
    job.wait_for("enter", 3, size=3)
    assert job.finish() == 0
