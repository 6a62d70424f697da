"""baguarun over ssh, with a real sshd and hosts that only ssh can resolve."""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bagua_hvd.core.version import __version__
from bagua_hvd.runner.ssh.connection import RemoteHost
from bagua_hvd.runner.ssh.frames import Begin, Kind, Reader, Start, pack
from launcher import wait_until

PRINT_ENVIRONMENT = [sys.executable, "-c", "import json, os; "
                     "print(json.dumps([dict(os.environ), os.getcwd(), os.readlink('/proc/self/fd/0')]))"]
SAY_UP_AND_SLEEP = [sys.executable, "-c", "import time; print('up'); time.sleep(60)"]


def seen(launcher, ssh_hosts, *arguments, **options):
    """{rank: [its environment, folder, standard input]}."""
    env = {**ssh_hosts.environment, **options.pop("env", {})}
    done = launcher.run(*arguments, *PRINT_ENVIRONMENT, env=env, **options)
    assert done.returncode == 0, done.stderr
    lines = [re.fullmatch(r"\[(\d+)\]<stdout>:(.*)", line).groups() for line in done.stdout.splitlines()]
    return {int(rank): json.loads(text) for rank, text in lines}


def test_ranks_of_two_hosts(launcher, ssh_hosts):
    ranks = seen(launcher, ssh_hosts, "-np", 5, "-H", "far1:3,far2:3", env={
        "MINE": "kept $HOME 'x' \u00e9", "UNDECODABLE": os.fsdecode(b"\xff"), "CUDA_VISIBLE_DEVICES": "7",
        "BASH_FUNC_f%%": "() { :; }", "SSH_AUTH_SOCK": "/launcher/only", "BAGUA_HVD_HOST_ID": "mine",
        "NCCL_SOCKET_IFNAME": "mine0",
        "LOCAL_RANK": "9", "RANK": "9", "TORCHELASTIC_RUN_ID": "x", "OMPI_COMM_WORLD_RANK": "9", "SLURM_PROCID": "9",
        "BAGUA_HVD_EXCLUDE_ENV": "TOKEN_*,ALONE", "TOKEN_A": "x", "ALONE": "x", "ALONE_TOO": "x"})
    names = ("HOSTNAME", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert {rank: " ".join(env["HOROVOD_" + name] for name in names) for rank, (env, _, _) in ranks.items()} == {
        0: "far1 0 5 0 3 0 2", 1: "far1 1 5 1 3 0 2", 2: "far1 2 5 2 3 0 1", 3: "far2 3 5 0 2 1 2",
        4: "far2 4 5 1 2 1 2"}
    secrets = set()
    for env, folder, standard_input in ranks.values():
        assert folder == env["PWD"] == str(launcher.folder) and standard_input == "/dev/null"
        assert env["MINE"] == "kept $HOME 'x' \u00e9" and env["UNDECODABLE"] == "\udcff"
        assert env["PYTHONPATH"] and env["PYTHONUNBUFFERED"] == "1" and env["HOROVOD_CONTROLLER"] == "gloo"
        assert env["NCCL_SOCKET_IFNAME"] == "mine0" and env["ALONE_TOO"] == "x"
        assert not env.keys() & {"CUDA_VISIBLE_DEVICES", "SSH_AUTH_SOCK", "BAGUA_HVD_HOST_ID", "LOCAL_RANK", "RANK",
                                 "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "TOKEN_A", "ALONE"}
        assert not any(name.startswith("BASH_FUNC_") for name in env)
        secrets.add(env["_HOROVOD_SECRET_KEY"])
    assert len(secrets) == 1


def test_here_and_there(launcher, ssh_hosts):
    ranks = seen(launcher, ssh_hosts, "-np", 3, "-H", "localhost:1,far1:2")
    assert [ranks[rank][0]["HOROVOD_HOSTNAME"] for rank in range(3)] == ["localhost", "far1", "far1"]
    assert len({ranks[rank][0]["HOROVOD_GLOO_RENDEZVOUS_ADDR"] for rank in range(3)}) == 1


@pytest.mark.parametrize("hosts, names", [
    ("far1:1,far2:1", "far1 and far2"), ("localhost:1,far1:1", "localhost and far1"), ("far1:2", None)])
def test_two_names_of_one_machine_are_a_warning(launcher, ssh_hosts, hosts, names):
    done = launcher.run("-np", 2, "-H", hosts, "true", env=ssh_hosts.environment)
    assert done.returncode == 0
    assert [f"warning: {names} are the same machine" in done.stderr, "warning" in done.stderr] == [bool(names)] * 2


def test_hostfile_port_and_key(launcher, ssh_hosts):
    """Flags instead of a configuration file: the name must resolve then, and not to an address of this host."""
    (launcher.folder / "hosts").write_text("far1 slots=1   # a comment\nfar2:1\n")
    config = launcher.folder / "config"
    config.write_text(f"Host far*\n  HostName 127.0.0.1\nHost *\n  UserKnownHostsFile {launcher.folder}/known\n")
    ranks = seen(launcher, ssh_hosts, "-np", 2, "--hostfile", "hosts", "-p", ssh_hosts.port, "-i", ssh_hosts.key,
                 env={"BAGUA_HVD_SSH_COMMAND": f"ssh -F {config}"})
    assert [ranks[rank][0]["HOROVOD_HOSTNAME"] for rank in range(2)] == ["far1", "far2"]


def test_other_hosts_without_heartbeats(launcher, fake_ssh):
    done = launcher.run("-np", 2, "-H", "far1:1,far2:1", "true",
                        env={**fake_ssh.environment, "BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS": "0"})
    assert done.returncode == 0, done.stderr


def test_network_interface(launcher, ssh_hosts):
    ranks = seen(launcher, ssh_hosts, "-np", 1, "-H", "far1:1", "--network-interfaces", "lo")
    env = ranks[0][0]
    assert (env["HOROVOD_GLOO_IFACE"], env["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
    done = launcher.run("-np", 1, "-H", "far1:1", "--network-interface", "none0", "true", env=ssh_hosts.environment)
    assert done.returncode == 1 and "has no interface of none0 with an IPv4 or global IPv6 address" in done.stderr


def test_a_collective(launcher, ssh_hosts):
    code = ("import torch, bagua_hvd.torch as hvd; hvd.init(); "
            "print(hvd.allreduce(torch.full((3,), float(hvd.rank())), op=hvd.Sum).tolist())")
    done = launcher.run("-np", 4, "-H", "far1:2,localhost:2", sys.executable, "-c", code, timeout=80,
                        env={**ssh_hosts.environment, "HOROVOD_START_TIMEOUT": "70"})
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>:[6.0, 6.0, 6.0]" for rank in range(4)]


def test_output_and_exit_code(launcher, ssh_hosts):
    # Rank 1 fails when rank 0 has printed everything.
    script = ('printf "out\\r\\n\\377end"; echo err >&2; [ $HOROVOD_RANK = 0 ] && : > said && exec sleep 60; '
              'until [ -e said ]; do sleep 0.1; done; exit 7')
    done = launcher.run("-np", 2, "-H", "far1:1,far2:1", "--output-filename", "logs", "sh", "-c", script,
                        env=ssh_hosts.environment)
    assert done.returncode == 7
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}]<stdout>:{text}" for rank in (0, 1) for text in ("out", "\udcffend")]
    assert "[1]<stderr>:err\n" in done.stderr and "Process 1 exit with status code 7.\n" in done.stderr
    assert (launcher.folder / "logs" / "rank.1" / "stdout").read_bytes() == b"out\r\n\xffend"


def test_much_output_is_whole(launcher, ssh_hosts):
    code = "import os, sys\nfor i in range(300): sys.stdout.write(os.environ['HOROVOD_RANK'] * 5000 + '\\n')"
    done = launcher.run("-np", 3, "-H", "far1:3", sys.executable, "-c", code, env=ssh_hosts.environment)
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == 900 and set(lines) == {f"[{r}]<stdout>:" + str(r) * 5000 for r in range(3)}


def test_secret_is_on_no_command_line(launcher, ssh_hosts):
    popen = launcher.start("-np", 2, "-H", "far1:1,far2:1", *SAY_UP_AND_SLEEP, env=ssh_hosts.environment)
    assert [popen.stdout.readline().endswith(b"up\n") for _ in range(2)] == [True, True]
    secrets = set()
    for pid in ssh_hosts.left():
        with contextlib.suppress(OSError):      # it may have ended
            secrets.update(re.findall(rb"_HOROVOD_SECRET_KEY=([^\0]+)", Path(f"/proc/{pid}/environ").read_bytes()))
    assert len(secrets) == 1
    secret = secrets.pop()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            assert secret not in Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            pass
    popen.terminate()
    stdout, stderr = popen.communicate(timeout=60)
    assert secret not in stdout + stderr


# ---- hosts that cannot be used ----------------------------------------------------------------------------------

def errors(done):
    assert done.returncode == 1 and done.stdout == ""
    return [line for line in done.stderr.splitlines() if line.startswith("baguarun: error: ")]


def test_all_unreachable_hosts_are_named(launcher, ssh_hosts):
    done = launcher.run("-np", 3, "-H", "far1:1,away1.invalid:1,away2.invalid:1", "true", env=ssh_hosts.environment)
    found = errors(done)
    assert len(found) == 2
    for name, line in zip(("away1.invalid", "away2.invalid"), found, strict=True):
        assert f"host {name} cannot be reached (ssh: Could not resolve hostname" in line
        assert re.search(rf"check that `ssh -F \S+ {name} true` works", line)


def test_a_key_that_is_refused(launcher, ssh_hosts, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    config = tmp_path / "config"
    config.write_text(f"Host far1\n  HostName 127.0.0.1\n  Port {ssh_hosts.port}\nHost *\n  IdentitiesOnly yes\n"
                      f"  UserKnownHostsFile {tmp_path}/known\n")
    done = launcher.run("-np", 1, "-H", "far1:1", "-i", tmp_path / "other", "true",
                        env={"BAGUA_HVD_SSH_COMMAND": f"ssh -F {config}"})
    assert "Permission denied" in errors(done)[0]


def test_a_host_that_does_not_answer(launcher, ssh_hosts):
    os.kill(ssh_hosts.server.popen.pid, signal.SIGSTOP)
    try:
        done = launcher.run("-np", 1, "-H", "far1:1", "--start-timeout", 2, "true", env=ssh_hosts.environment)
    finally:
        os.kill(ssh_hosts.server.popen.pid, signal.SIGCONT)
    assert len(errors(done)) == 1 and "host far1" in errors(done)[0]


def test_no_python_there(launcher, ssh_hosts, tmp_path):
    """A login shell without that program: here, a Python of the launcher that is then renamed."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    env = {**os.environ, **ssh_hosts.environment, "PYTHONPATH": str(Path(__file__).parents[2])}
    code = (f"import os, sys; os.unlink({str(python)!r}); sys.executable, real = {str(python)!r}, sys.executable\n"
            "from bagua_hvd.runner import processes\n"
            "original = processes.subprocess.Popen\n"
            "processes.subprocess.Popen = lambda command, **options: original([real, *command[1:]], **options)\n"
            "sys.argv[1:] = ['-np', '1', '-H', 'far1:1', 'true']\n"
            "from bagua_hvd.runner.launch import run_commandline; run_commandline()")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"host far1 cannot run {python} with bagua_hvd" in done.stderr


def test_a_folder_that_is_not_there(launcher, ssh_hosts):
    folder = launcher.folder / "gone"
    code = ("import os, sys; sys.argv = ['baguarun', '-np', '1', '-H', 'far1:1', 'true']; "
            f"os.getcwd = lambda: {str(folder)!r}; "
            "from bagua_hvd.runner.launch import run_commandline; run_commandline()")
    env = {**os.environ, **ssh_hosts.environment, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"host far1 has no folder {folder}" in done.stderr


# ---- how it ends: the fixture checks for remaining processes ----------------------------------------------------

def start(launcher, ssh_hosts, *command, np=2, hosts="far1:1,far2:1"):
    """A baguarun with all ranks running."""
    popen = launcher.start("-np", np, "-H", hosts, *(command or SAY_UP_AND_SLEEP), env=ssh_hosts.environment)
    for _ in range(np):
        assert popen.stdout.readline().endswith(b"up\n")
    return popen


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals(launcher, ssh_hosts, signum):
    popen = start(launcher, ssh_hosts)
    popen.send_signal(signum)
    assert popen.wait(60) == 128 + signum
    assert launcher.processes() == [] and not ssh_hosts.left()


def test_ranks_that_ignore_sigterm_and_their_children(launcher, ssh_hosts):
    popen = start(launcher, ssh_hosts, "sh", "-c",
                  "trap '' TERM; (trap '' TERM; sleep 60) & echo up; while :; do sleep 1; done")
    popen.terminate()
    assert popen.wait(60) == 128 + signal.SIGTERM
    assert launcher.processes() == [] and not ssh_hosts.left()


def test_a_killed_launcher(launcher, ssh_hosts):
    popen = start(launcher, ssh_hosts, "sh", "-c", "sleep 60 & echo up; exec sleep 60", hosts="far1:1,localhost:1")
    popen.kill()
    wait_until(lambda: not launcher.processes() and not ssh_hosts.left())


def test_a_killed_agent(launcher, ssh_hosts):
    popen = start(launcher, ssh_hosts, "sh", "-c", "sleep 60 & echo up; exec sleep 60")
    agents = [pid for pid in ssh_hosts.left() if b"runner.ssh.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(agents[0], signal.SIGKILL)
    _, stderr = popen.communicate(timeout=60)
    assert popen.returncode == 255
    assert re.search(rb"the connection to host far[12] was lost", stderr)


def test_a_lost_connection(launcher, ssh_hosts):
    popen = start(launcher, ssh_hosts)
    for pid in ssh_hosts.server.sessions():
        with contextlib.suppress(ProcessLookupError):       # the end of one may end another
            os.kill(pid, signal.SIGKILL)
    _, stderr = popen.communicate(timeout=60)
    assert popen.returncode == 255 and b"was lost" in stderr and b"Traceback" not in stderr


def test_background_processes_end_with_the_job(launcher, ssh_hosts):
    done = launcher.run("-np", 1, "-H", "far1:1", "sh", "-c", "sleep 600 & echo end", env=ssh_hosts.environment)
    assert (done.returncode, done.stdout) == (0, "[0]<stdout>:end\n")
    assert not ssh_hosts.left()


def test_a_reader_that_sleeps_does_not_stop_ctrl_c(launcher, ssh_hosts):
    popen = launcher.start("-np", 2, "-H", "far1:2", "yes", env=ssh_hosts.environment)
    popen.stdout.read(1)
    time.sleep(2)       # all buffers between the ranks and here are full
    popen.send_signal(signal.SIGINT)
    assert popen.wait(60) == 128 + signal.SIGINT
    assert launcher.processes() == [] and not ssh_hosts.left()


def test_no_file_is_left(launcher, ssh_hosts):
    here = launcher.folder / "temporary"
    here.mkdir()
    before = set(os.listdir("/dev/shm"))
    assert launcher.run("-np", 2, "-H", "far1:2", "true",
                        env={**ssh_hosts.environment, "TMPDIR": str(here)}).returncode == 0
    assert [*here.iterdir(), *ssh_hosts.server.temporary.iterdir()] == []
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "bagua" in name or "bhvd" in name}


# A signal for a process that has already ended.
LATE_SIGNAL = """
import os
del os.pidfd_open
from bagua_hvd.runner.ssh import agent
on_signal = agent.Agent._on_signal
def late(self, number, signum):
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    on_signal(self, number, signum)
agent.Agent._on_signal = late
agent.main()
"""


def test_a_late_signal_does_not_hide_an_end_without_pidfd():
    frames = [pack(Kind.BEGIN, 0, Begin(__version__, os.getcwd(), 60.0)),
              pack(Kind.START, 3, Start(["sh", "-c", "exit 5"], {})),
              pack(Kind.SIGNAL, 3, signal.SIGTERM), pack(Kind.FINISH)]
    with subprocess.Popen([sys.executable, "-c", LATE_SIGNAL], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as popen:
        popen.stdin.write(b"".join(frames))
        popen.stdin.flush()         # and it stays open, as long as the launcher lives
        try:
            assert popen.wait(60) == 0
        finally:
            popen.kill()
        received = Reader(after_magic=True).feed(popen.stdout.read())
    assert (Kind.EXIT, 3, b"5") in received


class _LostMeanwhile(RemoteHost):
    """A connection that breaks while a process is registered."""

    def __init__(self):
        self._processes, self._count = {}, 0
        self._lock = threading.Lock()
        self._errors = iter([None])
        self.sent = []

    error = property(lambda self: next(self._errors, "lost"))

    def send(self, kind, number=0, payload=None):
        self.sent.append(kind)


def test_a_connection_lost_meanwhile_ends_a_process_once():
    host = _LostMeanwhile()
    process = host.start(0, ["true"], {})
    # It is registered, so only the thread that notices the loss ends it.
    assert (host.sent, [*host._processes.values()], process.poll()) == ([Kind.START], [process], None)
    process.end(255)
    process.close()
    for fd in (process.stdout, process.stderr, process.open_pidfd()):
        os.close(fd)
