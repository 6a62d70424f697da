"""Failures of hosts and programs give a sentence, in every version of Python."""
import concurrent.futures
import errno
import signal
import subprocess
import sys
import threading
import time

import pytest

from bagua_hvd.runner import mpi_run
from bagua_hvd.runner.elastic.run import Crew, _RankOutput
from bagua_hvd.runner.job import Job
from bagua_hvd.runner.output import Console
from bagua_hvd.runner.processes import Guard
from bagua_hvd.runner.ssh import network
from bagua_hvd.runner.ssh.connection import HostOptions
from bagua_hvd.runner.ssh.frames import Kind, Reader, pack
from launcher import ROOT


class SilentHost:
    """A fake RemoteHost whose agent does not respond; `late`: before Python 3.11 this is no TimeoutError."""

    name = "far"

    def request(self, function, **arguments):
        future = concurrent.futures.Future()
        future.result = self._late
        return future

    @staticmethod
    def _late(timeout):
        raise concurrent.futures.TimeoutError


def test_a_host_that_does_not_say_its_addresses():
    with pytest.raises(network.NoRoute, match="host far did not report within 3 s which addresses it has"):
        network.find_places([SilentHost()], ["localhost"], HostOptions(timeout_seconds=3))


class Neighbour:
    """A fake RemoteHost that responds immediately."""

    def __init__(self, name):
        self.name = name

    def request(self, function, **arguments):
        future = concurrent.futures.Future()
        future.set_result({"port": 1, "addresses": [["lo", "127.0.0.1"]]} if function == "listen" else [])
        return future


def test_a_host_asks_for_its_interface_while_others_join(monkeypatch):
    monkeypatch.setattr(network, "_here", lambda: Neighbour(network.LAUNCHER).request)
    hosts, net = [Neighbour(f"host{number}") for number in range(40)], network.Network()
    net.join(hosts[:1], [], 30)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            joining = pool.submit(lambda: [net.join([host], hosts[:i], 30) for i, host in enumerate(hosts) if i])
            while not joining.done():
                assert net.likely_interface("host0") == net.interface("host0", ["host0"]) == "lo"
            joining.result()
    finally:
        sys.setswitchinterval(before)


def test_hosts_are_connected_to_side_by_side_by_one_attempt_each(monkeypatch):
    """A dead host with four slots does not delay a live one, and is tried once."""
    attempts, dead = [], threading.Event()

    class Host:
        ready, host_hash = True, None

        def __init__(self, name):
            self.name = name
            self.error = None
            self.ssh_failed = False
            attempts.append(name)

        def wait_ready(self, timeout):
            if self.name == "dead.invalid":
                dead.wait(60)
                self.error = "no answer"
            return self.error is None

    class Ssh:
        @staticmethod
        def host(name):
            return Host(name)

    def call(function):
        future = concurrent.futures.Future()
        future.set_result(function())
        return future

    monkeypatch.setattr(network.Network, "join", lambda *arguments: None)
    monkeypatch.setattr(network.Network, "likely_interface", lambda self, name: "eth0")
    monkeypatch.setattr(network.Network, "rendezvous", lambda self, name, among: "10.0.0.1")
    reach = network.Reach(Ssh, HostOptions(), call)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(reach.find, "dead.invalid") for _ in range(4)]
        assert reach.find("live.invalid") == network.Place("eth0", "10.0.0.1")
        time.sleep(0.2)         # all four have arrived
        dead.set()
        for future in waiting:
            with pytest.raises(RuntimeError, match="no answer"):
                future.result(30)
    assert sorted(attempts) == ["dead.invalid", "live.invalid"]


def test_hosts_that_are_connected_to_in_turn_try_each_other(monkeypatch):
    joined = []

    class Host:
        ready, host_hash, error = True, None, None

        def __init__(self, name):
            self.name = name

        def wait_ready(self, timeout):
            return True

    class Ssh:
        host = Host

    def call(function):
        future = concurrent.futures.Future()
        future.set_result(function())
        return future

    def join(self, newcomers, others, timeout):
        joined.append(({host.name for host in newcomers}, {host.name for host in others}))

    monkeypatch.setattr(network.Network, "join", join)
    monkeypatch.setattr(network.Network, "likely_interface", lambda self, name: "eth0")
    monkeypatch.setattr(network.Network, "rendezvous", lambda self, name, among: "10.0.0.1")
    reach = network.Reach(Ssh, HostOptions(), call)
    reach.find("a")
    reach.find("b")
    assert joined == [({"a"}, set()), ({"b"}, {"a"})]


def test_a_worker_that_cannot_be_started_is_told_whatever_the_error():
    class NoReach:
        def find(self, host):
            raise KeyError("nobody has thought of this")

    ended = concurrent.futures.Future()
    crew = Crew(None, None, NoReach(), None, None, lambda *how: ended.set_result(how))
    crew.start(4, "far", None)
    assert ended.result(30) == (4, 255, "'nobody has thought of this'", None)


def test_a_lack_of_threads_is_reported_as_one_of_processes_is(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    ended = []
    crew = Crew(None, None, None, None, None, lambda *how: ended.append(how))
    monkeypatch.setattr(threading.Thread, "start", start)
    crew.start(4, "far", None)
    assert [(number, code, error.errno) for number, code, error, _ in ended] == [(4, None, errno.EAGAIN)]


def test_an_output_file_that_cannot_be_opened_costs_the_copy_only(tmp_path):
    """When a worker starts or gets a new rank, its output still goes to the console."""
    printed = []

    class Loop:
        @staticmethod
        def call_soon(function):
            function()

    class Sink:
        write = printed.append

    (tmp_path / "rank.1").write_text("no folder")
    job = Job([], {}, HostOptions(), str(tmp_path), console=Console(Sink, Sink))
    crew = Crew(job, Loop, None, None, None, None)
    output = _RankOutput(lambda rank: crew._forwarder(4, rank, "stdout"), 0)
    output.rank = 1
    output.feed(b"a\n")
    output.close()
    assert printed == [f"baguarun: not writing {tmp_path}/rank.1/stdout: File exists\n".encode(), b"[1]<stdout>:a\n"]


@pytest.fixture
def talk():
    """talk(frames, until): an agent's responses, up to the first frame of a kind: {kind: [number, payload]}."""
    code = "from bagua_hvd.runner.ssh.agent import main; main()"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          bufsize=0) as agent:
        def talk(*sent, until):
            reader, answers = Reader(after_magic=True), {}
            agent.stdin.write(b"".join(pack(*frame) for frame in sent))
            while until not in answers:
                data = agent.stdout.read(65536)
                assert data, "the agent has ended"
                answers.update({kind: rest for kind, *rest in reader.feed(data)})
            return answers

        yield talk


def test_an_agents_request_that_fails_is_answered(talk):
    request = (Kind.REQUEST, 7, ["reachable", {"targets": [["a", "no address", 1]], "key": "x"}])
    number, payload = talk(request, until=Kind.REFUSAL)[Kind.REFUSAL]
    assert number == 7 and payload.startswith(b'"reachable: ')


def test_a_process_that_is_to_start_when_all_get_a_signal_does_not(talk):
    answers = talk((Kind.START, 3, {"command": ["true"], "environment": {}}),
                   (Kind.SIGNAL_ALL, 0, signal.SIGTERM), until=Kind.EXIT)
    assert answers[Kind.EXIT] == [3, b"143"]


@pytest.mark.parametrize("text, words", [
    ("#!/bin/sh\nexec sleep 600\n", "--version` did not return within 1 s"),
    ("#!/no/interpreter\n", "mpirun cannot be run: No such file or directory")])
def test_an_mpirun_that_does_not_answer(tmp_path, monkeypatch, text, words):
    monkeypatch.setattr(mpi_run, "_VERSION_SECONDS", 1)
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(text)
    mpirun.chmod(0o755)
    with pytest.raises(FileNotFoundError, match=words):
        mpi_run._mpirun({"PATH": f"{tmp_path}:/bin:/usr/bin"})


def test_the_guard_starts_where_python_needs_the_loaders_variable(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$LD_LIBRARY_PATH" = /needed ] || exit 127\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/needed")
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as watched:
        guard = Guard()
        guard.watch(watched.pid)
        guard._popen.stdin.close()      # as if the launcher had been killed
        guard._popen.wait(30)
        assert watched.wait(30) == -signal.SIGKILL
