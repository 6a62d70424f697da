"""baguarun with real processes: their environment, their output, and how the job ends."""
import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher import wait_until

PYTHON = sys.executable
SENTENCE = ("Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
            "terminated.")


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    """A short grace for ranks that do not end when another one fails; test_failures.py is about those that do."""
    monkeypatch.setenv("BAGUA_HVD_GRACE_SECONDS", "0.5")


def python(code):
    """The command that runs this Python code."""
    return [PYTHON, "-c", code]


# ---- the ranks' environment -------------------------------------------------------------------------------------

PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


def environments(launcher, *arguments, **options):
    """{rank: its environment}."""
    done = launcher.run(*arguments, *python(PRINT_ENVIRONMENT), **options)
    assert done.returncode == 0, done.stderr
    lines = [re.fullmatch(r"\[(\d+)\]<stdout>:(.*)", line).groups() for line in done.stdout.splitlines()]
    return {int(rank): json.loads(text) for rank, text in lines}


def test_environment_of_the_ranks(launcher):
    seen = environments(launcher, "-np", 3, env={"MINE": "kept", "OLDPWD": "/", "BASH_FUNC_f%%": "() { :; }"})
    assert sorted(seen) == [0, 1, 2]
    secrets, ports = set(), set()
    for rank, env in seen.items():
        expected = {
            "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "3", "HOROVOD_LOCAL_RANK": str(rank), "HOROVOD_LOCAL_SIZE": "3",
            "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1", "HOROVOD_HOSTNAME": "localhost",
            "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "PYTHONUNBUFFERED": "1", "MINE": "kept"}
        assert {name: env.get(name) for name in expected} == expected
        assert "OLDPWD" not in env and not any(name.startswith("BASH_FUNC_") for name in env)
        secrets.add(env["_HOROVOD_SECRET_KEY"])
        ports.add(int(env["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    assert len(base64.b64decode(secrets.pop(), validate=True)) == 32 and not secrets
    assert len(ports) == 1 and 0 < ports.pop() < 65536


def test_an_outer_job_is_not_inherited(launcher):
    outer = {"HOROVOD_RANK": "5", "HOROVOD_SIZE": "9", "_HOROVOD_SECRET_KEY": "b3V0ZXI=", "HOROVOD_CONTROLLER": "mpi"}
    env = environments(launcher, "-np", 1, env=outer)[0]
    assert (env["HOROVOD_RANK"], env["HOROVOD_SIZE"], env["HOROVOD_CONTROLLER"]) == ("0", "1", "gloo")
    assert env["_HOROVOD_SECRET_KEY"] != outer["_HOROVOD_SECRET_KEY"]


def test_flags_reach_the_ranks(launcher):
    env = environments(launcher, "-np", 1, "--algorithm", "bytegrad", "--fusion-threshold-mb", 1, "--gloo")[0]
    assert (env["BAGUA_ALGORITHM"], env["HOROVOD_FUSION_THRESHOLD"]) == ("bytegrad", "1048576")


def test_nothing_is_imported_that_the_job_does_not_need():
    code = ("import sys; from bagua_hvd.runner import launch\n"
            "sys.argv[1:] = '-np', '1', 'true'\n"
            "launch.run_commandline()\n"
            "print([name for name in ('bagua_hvd.algorithms', 'numpy') if name in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "[]\n"


def test_two_names_of_this_host_are_two_hosts(launcher):
    seen = environments(launcher, "-np", 3, "-H", "localhost:2,127.0.0.1:2")
    names = ("HOSTNAME", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [tuple(seen[rank]["HOROVOD_" + name] for name in names) for rank in range(3)] == [
        ("localhost", "0", "2", "0", "2"), ("localhost", "1", "2", "0", "1"), ("127.0.0.1", "0", "1", "1", "2")]


def test_arguments_arrive_unchanged(launcher):
    arguments = ["a b", "", "it's", '"quoted"', "$HOME", "`id`", "*", "\\", "new\nline", "-np", "--verbose", "--",
                 "\u00e9"]
    done = launcher.run("-np", 1, *python("import json, sys; print(json.dumps(sys.argv[1:]))"), *arguments)
    assert json.loads(done.stdout.removeprefix("[0]<stdout>:")) == arguments


def test_standard_input_is_empty_and_sigpipe_is_default(launcher):
    # Not in Python, which ignores SIGPIPE on its own.
    done = launcher.run("-np", 1, "grep", "SigIgn", "/proc/self/status")
    assert int(done.stdout.split()[-1], 16) & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)) == 0
    assert launcher.run("-np", 2, "cat").returncode == 0


def test_text_without_an_interpreter_line_is_for_the_shell(launcher):
    script = launcher.folder / "script"
    script.write_text("echo rank $HOROVOD_RANK $1\n")
    script.chmod(0o755)
    assert launcher.run("-np", 1, "./script", "x y").stdout == "[0]<stdout>:rank 0 x y\n"


def test_secret_is_on_no_command_line_and_in_no_message(launcher):
    popen = launcher.start("-np", 2, "--verbose", *python("import os, time; print('up'); time.sleep(60)"))
    assert [popen.stdout.readline().endswith(b"up\n") for _ in range(2)] == [True, True]
    pids = launcher.processes()
    assert len(pids) == 3       # baguarun and two ranks; the guard has an empty environment
    environment = next(Path(f"/proc/{pid}/environ").read_bytes() for pid in pids if pid != popen.pid)
    secret = re.search(rb"_HOROVOD_SECRET_KEY=([^\0]+)", environment)[1]
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            assert secret not in Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            pass
    popen.terminate()
    stdout, stderr = popen.communicate(timeout=60)
    assert secret not in stdout + stderr and b"rank 1 of 2" in stderr


# ---- output -----------------------------------------------------------------------------------------------------

def test_sixty_four_ranks(launcher):
    done = launcher.run("-np", 64, "sh", "-c", "echo out $HOROVOD_RANK; echo err $HOROVOD_RANK >&2", timeout=60)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == sorted(f"[{r}]<stdout>:out {r}" for r in range(64))
    assert sorted(done.stderr.splitlines()) == sorted(f"[{r}]<stderr>:err {r}" for r in range(64))


def test_lines_of_ranks_do_not_mix(launcher):
    code = "import os, sys\nfor i in range(300): sys.stdout.write(os.environ['HOROVOD_RANK'] * 5000 + '\\n')"
    done = launcher.run("-np", 4, *python(code))
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == 1200 and set(lines) == {f"[{r}]<stdout>:" + str(r) * 5000 for r in range(4)}


def test_progress_bars_and_a_last_line_without_end(launcher):
    done = launcher.run("-np", 1, "printf", r"\r10%%\r20%%\n\377end")
    assert done.stdout == "[0]<stdout>:10%\n[0]<stdout>:20%\n[0]<stdout>:\udcffend\n"


def test_a_line_comes_at_once(launcher):
    popen = launcher.start("-np", 1, *python("import time; print('now'); time.sleep(60)"))
    assert popen.stdout.readline() == b"[0]<stdout>:now\n"
    popen.terminate()
    popen.communicate(timeout=60)


def test_timestamp(launcher):
    done = launcher.run("-np", 1, "--prefix-output-with-timestamp", "echo", "text")
    assert re.fullmatch(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:text\n", done.stdout)


def test_output_files(launcher):
    done = launcher.run("-np", 11, "--output-filename", "logs/run", "sh", "-c",
                        r"printf 'out %s\r\n\377' $HOROVOD_RANK; printf 'err' >&2")
    assert done.returncode == 0 and "[10]<stdout>:out 10\n" in done.stdout
    folder = launcher.folder / "logs" / "run"
    assert sorted(path.name for path in folder.iterdir()) == [f"rank.{r:02}" for r in range(11)]
    for rank in range(11):
        assert (folder / f"rank.{rank:02}" / "stdout").read_bytes() == b"out %d\r\n\xff" % rank
        assert (folder / f"rank.{rank:02}" / "stderr").read_bytes() == b"err"


def test_output_folder_that_cannot_be(launcher):
    (launcher.folder / "file").write_text("")
    done = launcher.run("-np", 1, "--output-filename", "file/logs", "true")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "file/logs" in done.stderr


def test_nobody_reads_the_output(launcher):
    reader, writer = os.pipe()
    popen = launcher.start("-np", 2, "yes", stdout=writer)
    os.close(writer)
    os.read(reader, 100)
    os.close(reader)
    assert popen.wait(60) == 128 + signal.SIGPIPE
    assert launcher.processes() == []


def test_a_reader_that_sleeps_does_not_stop_ctrl_c(launcher):
    popen = launcher.start("-np", 2, "yes")
    wait_until(lambda: [_name(pid) for pid in launcher.processes()].count("yes") == 2)
    time.sleep(1)       # the pipe is full
    popen.send_signal(signal.SIGINT)
    assert popen.wait(60) == 128 + signal.SIGINT
    assert launcher.processes() == []


def test_closed_standard_descriptors(launcher):
    command = f"exec {PYTHON} -m bagua_hvd.runner.launch -np 2 sh -c 'echo x; exit 3' <&- >&- 2>&-"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run(["sh", "-c", command], env=env, timeout=60).returncode == 3


# ---- how it ends ------------------------------------------------------------------------------------------------

# Ranks that run longer than a test may take: a test that passes proves that they were stopped.
LONG = "sleep 600"


def failing(rank, action, others=LONG):
    """A shell command; one rank performs the action."""
    return ["sh", "-c", f'if [ "$HOROVOD_RANK" = {rank} ]; then {action}; else {others}; fi']


@pytest.mark.parametrize("action, code", [
    ("exit 1", 1), ("exit 3", 3), ("exit 255", 255), ("kill -KILL $$", 137), ("kill -SEGV $$", 139)])
def test_first_failure_ends_the_job(launcher, action, code):
    done = launcher.run("-np", 3, *failing(1, action))
    assert done.returncode == code
    assert f"Process 1 exit with status code {code}.\n" in done.stderr
    assert "Terminating remaining workers after failure of Process 1.\n" in done.stderr
    assert f"{SENTENCE} The first process to do so was: Process name: 1, Exit code: {code}" in done.stderr
    assert "Process 0 exit" not in done.stderr


def test_last_words_come_before_the_message(launcher):
    done = launcher.run("-np", 1, *python("import sys; sys.stderr.write('x' * 50000 + '\\nlast words'); sys.exit(4)"))
    assert done.returncode == 4
    assert done.stderr.index("last words") < done.stderr.index("Process 0 exit with status code 4.")


# Waits until the other rank has set its trap.
FAIL_WHEN_READY = "until [ -e ready ]; do sleep 0.1; done; exit 9"


def test_one_that_ignores_sigterm_is_killed(launcher):
    started = time.monotonic()
    done = launcher.run("-np", 2, *failing(0, FAIL_WHEN_READY, "trap '' TERM; : > ready; while :; do sleep 1; done"))
    assert done.returncode == 9
    assert time.monotonic() - started > 5       # not before the grace is over


def test_sigterm_leaves_time_to_save(launcher):
    done = launcher.run("-np", 2, *failing(
        0, FAIL_WHEN_READY, f"trap 'sleep 1; echo saved; exit 0' TERM; {LONG} & : > ready; wait"))
    assert done.returncode == 9 and "[1]<stdout>:saved\n" in done.stdout


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_job(launcher, signum):
    # A worker with child processes in its own process group and, by job control, in another one. Each prints that it
    # got a signal; SIGKILL, after the grace, would not allow that.
    child = f"(trap 'echo told; exit' TERM; echo up; {LONG} & wait)"
    popen = launcher.start("-np", 2, "bash", "-c", f"trap : TERM; set -m; {child} & set +m; {child} & wait; wait")
    assert [popen.stdout.readline().endswith(b"up\n") for _ in range(4)] == [True] * 4
    popen.send_signal(signum)
    stdout, stderr = (text.decode() for text in popen.communicate(timeout=60))
    assert popen.returncode == 128 + signum
    assert sorted(stdout.splitlines()) == ["[0]<stdout>:told"] * 2 + ["[1]<stdout>:told"] * 2
    assert launcher.processes() == []
    assert signal.Signals(signum).name in stderr and "Traceback" not in stderr and "Process 0 exit" not in stderr


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_warnings_of_a_batch_system_reach_the_ranks(launcher, signum):
    # Not the ranks' own workers, which would die of it.
    script = f"{LONG} & trap 'kill $! && echo saved; exit 0' {signum.name}; echo up; wait"
    popen = launcher.start("-np", 2, "bash", "-c", script)
    assert [popen.stdout.readline().endswith(b"up\n") for _ in range(2)] == [True, True]
    popen.send_signal(signum)
    stdout, stderr = (text.decode() for text in popen.communicate(timeout=60))
    assert popen.returncode == 0 and sorted(stdout.splitlines()) == ["[0]<stdout>:saved", "[1]<stdout>:saved"], stderr


STUBBORN = ["sh", "-c", "trap '' TERM INT HUP; echo up; while :; do sleep 1; done"]


def test_a_second_ctrl_c_kills_at_once(launcher):
    popen = launcher.start("-np", 2, *STUBBORN)
    assert [popen.stdout.readline().endswith(b"up\n") for _ in range(2)] == [True, True]
    started = time.monotonic()
    popen.send_signal(signal.SIGINT)
    assert b"the signal once more kills it at once" in popen.stderr.readline()
    time.sleep(0.6)             # two signals closer together count as one
    assert popen.poll() is None
    popen.send_signal(signal.SIGINT)
    popen.communicate(timeout=60)
    # Before the grace is over.
    assert popen.returncode == 130 and time.monotonic() - started < 5
    assert launcher.processes() == []


def test_nohup_survives_sighup(launcher):
    popen = launcher.start("-np", 1, "sh", "-c", "echo up; sleep 2; echo end",
                           preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert popen.stdout.readline() == b"[0]<stdout>:up\n"
    popen.send_signal(signal.SIGHUP)
    assert popen.communicate(timeout=60)[0] == b"[0]<stdout>:end\n" and popen.returncode == 0


@pytest.mark.parametrize("command", [
    ["sleep", "60"], STUBBORN, ["bash", "-c", "set -m; sleep 60 & sleep 60 & echo up; wait"]],
    ids=["direct", "stubborn", "grandchildren"])
def test_ranks_die_with_a_killed_launcher(launcher, command):
    popen = launcher.start("-np", 3, *command)
    if "up" in command[-1]:
        assert [popen.stdout.readline().endswith(b"up\n") for _ in range(3)] == [True] * 3
    else:
        wait_until(lambda: len(launcher.processes()) == 4)
    popen.kill()
    popen.wait()
    wait_until(lambda: not launcher.processes())


def test_launcher_killed_while_it_starts(launcher):
    for delay in (0.1, 0.15, 0.2, 0.25, 0.3):
        popen = launcher.start("-np", 16, "sleep", "60")
        time.sleep(delay)
        popen.kill()
        popen.wait()
    wait_until(lambda: not launcher.processes())


def test_ranks_have_the_death_signal_themselves(launcher):
    """They have it even without the guard."""
    popen = launcher.start("-np", 2, "sleep", "60")
    ranks = wait_until(lambda: [pid for pid in launcher.processes() if _name(pid) == "sleep"][:2])
    wait_until(lambda: len([pid for pid in launcher.processes() if _name(pid) == "sleep"]) == 2)
    guards = [pid for pid in _children(popen.pid) if b"processes.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(guards) == 1 and ranks
    os.kill(guards[0], signal.SIGKILL)
    popen.kill()
    popen.wait()
    wait_until(lambda: not launcher.processes())


def _name(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None


def _children(pid):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(name))
        except OSError:
            pass
    return found


def test_a_background_process_does_not_hold_the_job(launcher):
    done = launcher.run("-np", 2, "sh", "-c", f"{LONG} & echo end")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:end", "[1]<stdout>:end"]


def test_a_daemon_that_writes_for_ever_does_not_hold_the_job(launcher):
    done = launcher.run("-np", 1, "sh", "-c", "yes & sleep 0.2; echo end >&2")
    assert done.returncode == 0 and "[0]<stderr>:end\n" in done.stderr


# ---- invalid input ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, code, words", [
    (["true"], 2, "-np is missing"),
    (["-np", "0", "true"], 2, "'0': expected an integer from 1 "),
    (["-np", "-2", "true"], 2, "'-2': expected an integer from 1 "),
    (["-np", "two", "true"], 2, "'two': expected an integer from 1 "),
    (["-np", "2"], 2, "the command is missing"),
    (["-np", "2", "--"], 2, "the command is missing"),
    (["-np", "3", "-H", "localhost:2", "true"], 2,
     "Requested more processes (3) than there are available slots (2)"),
    (["-np", "1", "-H", "elsewhere.invalid:1", "true"], 1, "host elsewhere.invalid cannot be reached (ssh: Could not"),
    (["-np", "1", "-H", "localhost:x", "true"], 2, "expected name:slots"),
    (["-np", "1", "--unknown", "true"], 2, "unrecognized arguments: --unknown (see"),
    (["-np", "1", "--algoritm", "bytegrad", "true"], 2,
     "unrecognized arguments: --algoritm. Did you mean --algorithm? (see"),
    (["-np", "1", "--fusion-threshold-mb", "-1", "true"], 2, "--fusion-threshold-mb: '-1': expected an integer"),
    (["-np", "1", "--cycle-time-ms", "nan", "true"], 2, "--cycle-time-ms: 'nan': expected a number, 0 or more"),
    (["-np", "1", "--cache-capacity", "x", "true"], 2, "'x': expected an integer from 0 "),
    (["-np", "1", "--algorithm", "bytegrat", "true"], 2, "Did you mean 'bytegrad'? Known: async, auto, "),
    (["-np", "1", "--log-level", "loud", "true"], 2, "'loud': expected one of TRACE, DEBUG"),
    (["-np", "1", "--stall-check-warning-time-seconds", "60", "--stall-check-shutdown-time-seconds", "30", "true"], 2,
     "below the warning time"),
    (["-np", "1", "--autotune-gaussian-process-noise", "2", "true"], 2, "expected a number from 0 to 1"),
    (["-np", "1", "--blacklist-cooldown-range", "9", "1", "true"], 2, "1 <= MIN <= MAX <= 3600"),
    (["-np", "1", "-p", "70000", "true"], 2, "'70000': expected an integer from 1 to 65535"),
    (["-np", "1", "-i", "/no/key", "true"], 2, "ssh identity file /no/key: no such file"),
    (["-np", "1", "-H", "a:1", "--hostfile", "b", "true"], 2, "not allowed with argument -H"),
    (["-np", "1", "--gloo", "--mpi", "true"], 2, "not allowed with argument --gloo"),
    (["-np", "1", "--jsrun", "true"], 2, "jsrun is not supported"),
    (["-np", "1", "--hostfile", "/no/file", "true"], 2, "--hostfile /no/file: No such file"),
    (["-np", "1", "--config-file", "/no/file", "true"], 2, "--config-file /no/file: No such file"),
    (["-np", "1", "--config-file", "plain.yaml", "true"], 2, "plain.yaml: config key params.cache_capacity"),
    (["-np", "1", "--config-file", "broken.yaml", "true"], 2, "--config-file broken.yaml is not YAML"),
    (["-np", "1", "no-such-command"], 1, "command 'no-such-command': not found in PATH"),
    (["-np", "1", "./no-such-script"], 1, "no such file"),
    (["-np", "1", "/"], 1, "is a directory"),
    (["-np", "1", "./plain.py"], 1, "run `python ./plain.py`"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_wrong_input_is_one_sentence(launcher, arguments, code, words):
    (launcher.folder / "plain.py").write_text("")
    (launcher.folder / "plain.yaml").write_text("params: {cache_capacity: many}\n")
    (launcher.folder / "broken.yaml").write_text("params: {\n")
    done = launcher.run(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr and done.stderr.startswith("baguarun: error: ") and done.stderr.count("\n") == 1


def test_a_malformed_variable_that_is_read_late_is_one_sentence(launcher):
    done = launcher.run("-np", "1", "-H", "elsewhere.invalid:1", "true", env={"BAGUA_HVD_EXCLUDE_ENV": ","})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("baguarun: error: ") and "BAGUA_HVD_EXCLUDE_ENV=','" in done.stderr


def test_config_file(launcher):
    (launcher.folder / "job.yaml").write_text("params:\n  cache_capacity: 5\n  fusion_threshold_mb: 2\n  mine: 1\n")
    arguments = ["-np", 1, "--config-file", "job.yaml", "--fusion-threshold-mb", 1]
    env = environments(launcher, *arguments)[0]
    assert (env["HOROVOD_CACHE_CAPACITY"], env["HOROVOD_FUSION_THRESHOLD"]) == ("5", "1048576")
    warning = launcher.run(*arguments, "true").stderr
    assert warning == "baguarun: warning: --config-file job.yaml: unknown key params.mine\n"


def test_dry_run(launcher):
    done = launcher.run("-np", 3, "-H", "localhost:1,far.invalid:2", "--dry-run", "sh", "-c", "a b")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "rank 0 of 3: host localhost, local rank 0 of 1, cross rank 0 of 2, started here: sh -c 'a b'",
        "rank 1 of 3: host far.invalid, local rank 0 of 2, cross rank 1 of 2, started by ssh: sh -c 'a b'",
        "rank 2 of 3: host far.invalid, local rank 1 of 2, cross rank 0 of 1, started by ssh: sh -c 'a b'"]


def test_an_interpreter_that_is_missing(launcher):
    script = launcher.folder / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = launcher.run("-np", 1, "./script")
    assert done.returncode == 127 and "cannot run ./script: No such file or directory" in done.stderr


def without_extension(folder):
    """A PYTHONPATH that looks like a source folder without a built extension."""
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['bagua_hvd._native'] = None\n")
    return f"{folder}{os.pathsep}{Path(__file__).parents[2]}"


def test_an_extension_that_is_not_built(launcher):
    done = launcher.run("-np", 1, "true", env={"PYTHONPATH": without_extension(launcher.folder)})
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "not built" in done.stderr and "pip install ." in done.stderr


@pytest.mark.long
def test_check_build_without_the_extension(launcher):
    path = without_extension(launcher.folder)
    assert "[ ] bagua_hvd._native" in launcher.run("-cb", env={"PYTHONPATH": path}).stdout


# ---- facts ------------------------------------------------------------------------------------------------------

def test_version(launcher):
    import bagua_hvd

    done = launcher.run("--version")
    assert (done.returncode, done.stdout) == (0, bagua_hvd.__version__ + "\n")


def test_check_build(launcher):
    done = launcher.run("--check-build")
    assert (done.returncode, done.stderr) == (0, "")        # no messages of the frameworks either
    for name in ("bagua_hvd._native", "Gloo", "inproc", "shm", "tcp", "scalar"):
        assert f"[X] {name}" in done.stdout
    for title in ("Available Frameworks:", "Available Controllers:", "Available Tensor Operations:",
                  "Ways to Start Ranks:", "GPUs:", "CPU Features:"):
        assert f"\n{title}\n    [" in done.stdout
    for line in done.stdout.splitlines():
        assert not line.startswith(" ") or re.match(r"    \[[X ]\] \S", line)
