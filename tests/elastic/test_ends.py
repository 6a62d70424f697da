"""How elastic jobs end when they cannot continue: one sentence, and an exit code."""
import re
import signal
from pathlib import Path

import pytest

from bagua_hvd.runner.elastic.discovery import HostDiscoveryScript
from elastic_job import with_rank
from launcher import wait_until

WORKER = [Path(__file__).with_name("plain_worker.py")]
A, B, C = "localhost", "127.0.0.2", "127.0.0.3"
TIMED_OUT = "Timed out waiting for minimum number of slots to become available: 2 needed, 1 available, "


def last_line(job):
    return [line for line in job.output if line.startswith("baguarun")][-1]


def test_reset_limit(make_job):
    job = make_job({A: 1, B: 1, C: 1})
    job.start("--min-np", 1, "--reset-limit", 1, command=WORKER)
    first = job.wait_for("enter", 3, size=3)
    job.kill(first[0])
    job.kill(job.wait_for("enter", 2, size=2)[0])
    job.wait_for_text("exceeded limit")
    assert job.finish() == 1
    assert last_line(job) == ("baguarun: error: Horovod was shutdown because number of resets during elastic job "
                              "exceeded limit: 1")


def test_too_few_slots_at_the_start(make_job):
    job = make_job({A: 1})
    job.start("--min-np", 2, "--elastic-timeout", 1, command=WORKER)
    job.wait_for_text(TIMED_OUT + "for 1 s")
    assert job.finish() == 1
    assert job.of("up") == []


def test_waits_for_min_np_and_goes_on(make_job):
    job = make_job({A: 1})
    job.start("-np", 2, "--min-np", 2, command=WORKER)
    job.wait_for_text("waiting for slots: 2 needed, 1 available")
    job.set_hosts({A: 1, B: 1})
    first = job.wait_for("enter", 2, size=2)
    job.kill(with_rank(first, 1))
    job.wait_for_text("waiting for slots: 2 needed, 1 available")
    job.set_hosts({A: 1, C: 1})
    second = job.wait_for("enter", 4, size=2)[2:]
    assert with_rank(first, 0).words["pid"] in {event.words["pid"] for event in second}
    assert job.finish() == 0


def test_gives_up_below_min_np(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 2, "--elastic-timeout", 2, command=WORKER)
    job.kill(job.wait_for("enter", 2, size=2)[1])
    job.wait_for_text(TIMED_OUT + "for 2 s")
    assert job.finish() == 1
    # The survivor got a message instead of a signal: it could have saved its state.
    assert re.search(r"<stderr>:ValueError: Horovod initialization failed. The elastic job has ended: Timed", job.text)
    assert "Terminating" not in job.text


def test_fixed_hosts_are_not_waited_for(make_job):
    job = make_job({})
    job.start("-np", 2, "-H", f"{A}:1,{B}:1", "--min-np", 2, command=WORKER, script=False)
    job.kill(job.wait_for("enter", 2, size=2)[1])
    job.wait_for_text(TIMED_OUT + "and no host can come back")
    assert job.finish() == 1


def test_all_fail(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 1, command=["-c", "raise SystemExit(3)"])
    assert job.finish() == 3
    assert "Process name: 0, Exit code: 3" in last_line(job) or "Process name: 1, Exit code: 3" in last_line(job)


def test_no_state_is_left(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 1, command=WORKER)
    first = job.wait_for("enter", 2, size=2)
    job.wait_for("committed", 2)
    job.kill(first[0])
    job.kill(first[1])
    job.wait_for_text("No hosts from previous set remaining, unable to broadcast state.")
    assert job.finish() == 137


def test_a_failure_after_the_end_of_another_worker_is_a_failure(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 2, command=WORKER, env={"TEST_FAULT": "end"})
    job.wait_for("committed", 2)
    assert job.finish() == 7
    assert "Process name: 1, Exit code: 7" in last_line(job)


def test_workers_that_never_call_init(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 2, command=["-c", "print('hello')"])
    assert job.finish() == 0
    assert sorted(line for line in job.output if "hello" in line) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]


def test_a_signal_stops_the_job(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 2, command=WORKER)
    job.wait_for("enter", 2)
    job.signal(signal.SIGTERM)
    assert job.finish() == 128 + signal.SIGTERM
    assert last_line(job).endswith("stopped by SIGTERM; all processes of the job have ended.")


def test_launcher_killed(make_job, launcher):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 2, command=WORKER)
    job.wait_for("enter", 2)
    job.signal(signal.SIGKILL)
    wait_until(lambda: launcher.processes() == [])


@pytest.mark.parametrize("flags, sentence", [
    (["-np", 2, "--min-np", 1], "an elastic job needs two hosts or a discovery script"),
    (["-np", 2, "--min-np", 3, "-H", f"{A}:2,{B}:2"], "-np 2 is below --min-np 3"),
    (["--min-np", 2, "--max-np", 1, "-H", f"{A}:2,{B}:2"], "--max-np 1 is below the 2 processes"),
    (["--min-np", 5, "-H", f"{A}:2,{B}:2"], "Requested more processes (5) than there are available slots (4)"),
    (["--min-np", 1, "--blacklist-cooldown-range", 5, 2], "--blacklist-cooldown-range 5 2"),
])
def test_wrong_flags(launcher, flags, sentence):
    done = launcher.run(*flags, "true")
    assert done.returncode == 2 and sentence in done.stderr


@pytest.mark.parametrize("first", [True, False])
def test_ctrl_c_while_the_discovery_hangs(launcher, first):
    """Nothing of the script keeps running; `launcher` would find it."""
    script = launcher.folder / "discover.sh"
    hang = "touch hangs; sleep 600"
    script.write_text("#!/bin/sh\n" + (hang if first else f"if [ -e once ]; then {hang}; fi; touch once; "
                                       "echo localhost:1; echo 127.0.0.2:1\n"))
    script.chmod(0o755)
    popen = launcher.start("--min-np", 1, "--host-discovery-script", script, "sleep", "600")
    wait_until(lambda: (launcher.folder / "hangs").exists())
    popen.send_signal(signal.SIGINT)
    stderr = popen.communicate(timeout=60)[1].decode()
    assert popen.returncode == 130 and "Traceback" not in stderr, stderr
    assert launcher.processes() == []


def test_too_few_descriptors_for_the_workers(launcher):
    limited = "sh", "-c", 'ulimit -n 60; exec "$@"', "sh"
    done = launcher.run("-np", 30, "--min-np", 1, "-H", f"{A}:15,{B}:15", "sleep", "600", prefix=limited,
                        env={"BAGUA_HVD_GRACE_SECONDS": "0"})
    assert done.returncode == 1 and "blacklisted" not in done.stderr
    assert "Too many open files: every rank needs three descriptors; raise the limit" in done.stderr


def test_discovery_that_fails_the_first_time(launcher):
    script = launcher.folder / "discover.sh"
    script.write_text("#!/bin/sh\necho none >&2; exit 4\n")
    done = launcher.run("--min-np", 1, "--host-discovery-script", script, "true")
    assert done.returncode == 1 and "cannot be run: Permission denied; run `chmod +x" in done.stderr
    script.chmod(0o755)
    done = launcher.run("--min-np", 1, "--host-discovery-script", script, "true")
    assert done.returncode == 1 and "ended with exit code 4: none" in done.stderr
    with pytest.raises(RuntimeError, match="without a number of slots"):
        script.write_text("#!/bin/sh\necho localhost\n")
        HostDiscoveryScript(str(script)).find_available_hosts_and_slots()
    assert HostDiscoveryScript(str(script), 3).find_available_hosts_and_slots() == {"localhost": 3}


# ---- the cause of a failure -------------------------------------------------------------------------------------

SUMMING = Path(__file__).parents[1] / "runner" / "summing_worker.py"
FAILED_FIRST = re.compile(r"The first process to do so was: Process name: (\d+), Exit code: (\d+)")


@pytest.mark.parametrize("hosts", [{A: 1, B: 1, C: 1}, {A: 2, B: 1}, {A: 1, B: 2}])
@pytest.mark.parametrize("action, code", [("sys.exit", 7), ("raise", 1), ("kill", 137)])
def test_the_one_that_failed_first_is_named(make_job, hosts, action, code):
    job = make_job({})
    where = ",".join(f"{host}:{slots}" for host, slots in hosts.items())
    job.start("-np", 3, "-H", where, "--min-np", 3, command=[SUMMING, 1, action], script=False)
    assert job.finish() == code
    assert FAILED_FIRST.search(last_line(job)).groups() == ("1", str(code))
    # The other ranks, including the one on its host, ended on their own, each with its own error.
    for rank in 0, 2:
        assert re.search(rf"\[{rank}\]<stderr>:.*HorovodInternalError: .*rank 1 ", job.text), job.text
    if action == "raise":
        said = [line for line in job.output if "<stderr>:" in line or line.startswith("baguarun")]
        assert said[-2] == "[1]<stderr>:LookupError: mine alone", job.text
        assert job.text.count("[1]<stderr>:LookupError: mine alone") <= 2


def test_a_job_that_cannot_go_on_tells_whose_failure_it_was(make_job):
    job = make_job({})
    job.start("-np", 2, "-H", f"{A}:1,{B}:1", "--min-np", 2, command=WORKER, script=False, env={"TEST_FAULT": "raise"})
    job.wait_for_text(TIMED_OUT + "and no host can come back")
    assert job.finish() == 1
    repeated = job.text.partition("baguarun: Process 1 failed first. It had written:\n")[2].splitlines()
    assert repeated[0] == "[1]<stderr>:Traceback (most recent call last):"
    assert repeated[-2] == "[1]<stderr>:LookupError: mine alone" and repeated[-1] == last_line(job)


def test_one_that_comes_to_init_after_the_job_has_failed_is_told_why(make_job):
    """Rank 0 saves, while rank 2 waits in init() in vain."""
    job = make_job({})
    job.start("-np", 3, "-H", f"{A}:1,{B}:1,{C}:1", "--min-np", 3, command=WORKER, script=False,
              env={"TEST_FAULT": "raise", "TEST_SAVE": "1.5"})
    job.wait_for("saved", 1, rank=0)
    assert job.finish() == 1
    for rank in 0, 2:
        assert (f"[{rank}]<stderr>:ValueError: Horovod initialization failed. The elastic job has ended: Timed out"
                in job.text)


def test_the_others_of_a_host_may_save_before_they_end(make_job):
    job = make_job({})
    job.start("-np", 3, "-H", f"{A}:2,{B}:1", "--min-np", 1, command=WORKER, script=False,
              env={"TEST_FAULT": "raise", "TEST_SAVE": "1.5"})
    job.wait_for("enter", 1, size=1)
    job.wait_for("saved", 1, rank=0)
    assert job.finish() == 0
    assert "this process has been removed from elastic job" in job.text


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_script_that_hangs_does_not_outlive_baguarun(launcher, signum):
    script = launcher.folder / "script"
    script.write_text("#!/bin/sh\nsleep 1000 & : > began; wait\n")
    script.chmod(0o755)
    popen = launcher.start("--host-discovery-script", script, "--min-np", 1, "true")
    wait_until((launcher.folder / "began").exists)
    popen.send_signal(signum)
    popen.wait(60)
    wait_until(lambda: not launcher.processes(), 20)
