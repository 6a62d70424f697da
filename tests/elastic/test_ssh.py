"""Elastic jobs on hosts that are reached by ssh."""
import os
import signal
import threading
import time
from pathlib import Path

from elastic_job import with_rank
from launcher import runs, wait_until

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
    job.start("--min-np", 1, "--start-timeout", 20, command=WORKER, env=fake_ssh.environment)
    job.wait_for("committed", 2)
    agent = fake_ssh.agent("far1")
    os.kill(agent, signal.SIGSTOP)
    try:
        job.set_hosts({"localhost": 1, "far1": 1, "far2": 1})
        job.wait_for("enter", 2, size=3)        # localhost and far2; far1 prints nothing
    finally:
        os.kill(agent, signal.SIGCONT)
    job.wait_for("enter", 3, size=3)
    assert job.finish() == 0


# On localhost, floods its host's output; a file per host says that it runs there.
SCRIPT = """: > began.$HOROVOD_HOSTNAME; [ $HOROVOD_HOSTNAME != localhost ] || [ -z "$FLOOD" ] || yes | head -c 4000000
sleep 1000"""


def test_a_host_that_is_added_while_nobody_reads_the_output(make_job, launcher, fake_ssh):
    job = make_job({"localhost": 1})
    popen = launcher.start("--host-discovery-script", job.script, "--min-np", 1, "--start-timeout", 10, "sh", "-c",
                           SCRIPT, env={**fake_ssh.environment, "FLOOD": "1"})
    wait_until((launcher.folder / "began.localhost").exists)
    job.set_hosts({"localhost": 1, "far1": 1})
    time.sleep(14)      # the host is found after 1 s, and is given up 10 s later
    threading.Thread(target=popen.stdout.read).start()
    wait_until((launcher.folder / "began.far1").exists)
    popen.terminate()
    popen.wait(60)


def test_a_new_host_whose_sshd_is_not_up_yet(make_job, launcher, fake_ssh):
    job = make_job({"localhost": 1, "far1": 1})
    fake_ssh.refuses.touch()
    popen = launcher.start("--host-discovery-script", job.script, "--min-np", 1, "sh", "-c", SCRIPT,
                           env=fake_ssh.environment)
    wait_until((launcher.folder / "began.localhost").exists)
    time.sleep(2)
    fake_ssh.refuses.unlink()
    wait_until((launcher.folder / "began.far1").exists)
    popen.terminate()
    popen.wait(60)


def test_what_a_dead_worker_has_started_on_another_host_dies_while_the_job_goes_on(make_job, launcher, fake_ssh):
    job = make_job({"localhost": 1, "far1": 1})
    script = """[ $HOROVOD_HOSTNAME = localhost ] && exec sleep 1000
sleep 1000 & echo $! > part; mv part child; kill -KILL $$"""
    popen = launcher.start("--host-discovery-script", job.script, "--min-np", 1, "sh", "-c", script,
                           env=fake_ssh.environment)
    wait_until((launcher.folder / "child").exists)
    wait_until(lambda: not runs((launcher.folder / "child").read_text().strip()), 20)
    assert popen.poll() is None
    popen.terminate()
    popen.wait(60)
