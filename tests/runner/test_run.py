"""bagua_hvd.run: functions on real ranks, their results and failures; nothing is left behind.

The functions are local: cloudpickle sends their code, as for functions of a script. Ranks cannot import this file.
"""
import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings

import psutil
import pytest

import bagua_hvd
from bagua_hvd.job.probe import interface_names
from bagua_hvd.runner import launch
from bagua_hvd.runner.run_function import _HorovodArgs
from launcher import MARK, ROOT, processes_of, wait_until


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch, tmp_path):
    """In every test no process, temporary folder or signal handler is left behind."""
    mark, folder = uuid.uuid4().hex, tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("BAGUA_HVD_GRACE_SECONDS", "0.5")     # most of these do not end by themselves
    monkeypatch.setattr(tempfile, "tempdir", None)
    children = set(psutil.Process().children())
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    handlers = [signal.getsignal(n) for n in numbers]
    yield
    left = processes_of(mark)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left and set(psutil.Process().children()) <= children
    assert list(folder.iterdir()) == []
    assert [signal.getsignal(n) for n in numbers] == handlers



# ---- arguments and results of the function ----------------------------------------------------------------------

def test_results_are_in_the_order_of_the_ranks():
    def function(base, *, factor):
        time.sleep(0.2 * (2 - int(os.environ["HOROVOD_RANK"])))
        return base + factor * int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])

    assert bagua_hvd.run(function, (10,), {"factor": 3}, num_proc=3) == [(10, 3), (13, 3), (16, 3)]


def test_one_rank_is_the_default():
    assert bagua_hvd.run(lambda: None) == [None]
    assert bagua_hvd.run is bagua_hvd.runner.run


def test_the_ranks_are_a_job():
    def function():
        from bagua_hvd.job import basics

        basics.init()
        return basics.rank(), basics.size(), basics.local_rank(), basics.cross_size()

    assert bagua_hvd.run(function, num_proc=2) == [(0, 2, 0, 1), (1, 2, 1, 1)]


def test_hosts_and_hostfile(tmp_path):
    def places():
        return [os.environ["HOROVOD_" + name] for name in ("HOSTNAME", "LOCAL_SIZE", "CROSS_SIZE")]

    expected = [["localhost", "1", "2"], ["127.0.0.1", "1", "2"]]
    assert bagua_hvd.run(places, num_proc=2, hosts="localhost:1,127.0.0.1:1", use_gloo=True) == expected
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1  # twice this host\n")
    assert bagua_hvd.run(places, num_proc=2, hostfile=tmp_path / "hosts") == expected


def test_start_timeout_reaches_the_ranks():
    assert bagua_hvd.run(lambda: os.environ["HOROVOD_START_TIMEOUT"], start_timeout=7) == ["7"]


def test_results_of_any_size():
    size = 50 << 20
    found = bagua_hvd.run(lambda: bytes([int(os.environ["HOROVOD_RANK"])]) * size, num_proc=2)
    assert [(len(data), data[:1], data[-1:]) for data in found] == [(size, b"\0", b"\0"), (size, b"\1", b"\1")]


def test_modules_are_found_where_the_caller_finds_them(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def value():\n    return 'found'\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    assert bagua_hvd.run(only_here.value, num_proc=2) == ["found", "found"]


def test_the_function_sees_no_arguments_of_ours():
    assert [argv[1:] for argv in bagua_hvd.run(lambda: sys.argv, num_proc=2)] == [[], []]


def test_another_python(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nANOTHER=yes exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert bagua_hvd.run(lambda: os.environ["ANOTHER"], executable=python) == ["yes"]


def test_from_another_thread():
    results = []
    thread = threading.Thread(target=lambda: results.extend(bagua_hvd.run(lambda: os.getpid(), num_proc=2)))
    thread.start()
    thread.join()
    assert len(set(results)) == 2


def test_two_jobs_at_once():
    results = {}

    def job(n):
        results[n] = bagua_hvd.run(lambda: (n, int(os.environ["HOROVOD_RANK"])), num_proc=n)

    threads = [threading.Thread(target=job, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [(1, 0)], 2: [(2, 0), (2, 1)]}


# ---- output -----------------------------------------------------------------------------------------------------

def speak():
    """A function that prints to both streams."""
    def function():
        print("out")
        print("err", file=sys.stderr)

    return function


def test_output_is_prefixed(capfd):
    bagua_hvd.run(speak(), num_proc=2)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0]<stdout>:out", "[1]<stdout>:out"]
    assert sorted(err.splitlines()) == ["[0]<stderr>:err", "[1]<stderr>:err"]


def test_output_goes_to_what_stands_in_for_the_streams(capfd, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", None)
    with contextlib.redirect_stdout(out):
        bagua_hvd.run(speak())
    assert out.getvalue() == "[0]<stdout>:out\n"
    assert capfd.readouterr() == ("", "")


def test_output_files(tmp_path, capfd):
    bagua_hvd.run(speak(), num_proc=2, output_filename=tmp_path / "logs")
    for name in ("rank.0", "rank.1"):
        assert (tmp_path / "logs" / name / "stdout").read_text() == "out\n"
        assert (tmp_path / "logs" / name / "stderr").read_text() == "err\n"
    assert "[1]<stdout>:out\n" in capfd.readouterr().out


def test_verbose_shows_the_plan(capfd):
    bagua_hvd.run(lambda: None, num_proc=2, verbose=True)
    assert "rank 1 of 2" in capfd.readouterr().err


# ---- how it fails -----------------------------------------------------------------------------------------------

def on_rank(failing, action):
    """A function that performs the action on one rank, while the others wait."""
    def function():
        if int(os.environ["HOROVOD_RANK"]) == failing:
            return action()
        time.sleep(600)         # longer than a test may take

    return function


def divide():
    """An action that raises."""
    def the_culprit():
        return 1 / 0

    return the_culprit


def test_an_exception_in_the_function(capfd):
    with pytest.raises(RuntimeError) as caught:
        bagua_hvd.run(on_rank(1, divide()), num_proc=3)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    text = str(caught.value)
    assert "Process name: 1, Exit code: 1" in text
    assert "Rank 1: User function raise error: ZeroDivisionError: division by zero\nTraceback " in text
    assert "the_culprit" in text and "function_task.py" not in text
    err = capfd.readouterr().err
    assert "[1]<stderr>:User function raise error: ZeroDivisionError: division by zero\n[1]<stderr>:Traceback " in err


def test_the_first_to_raise_is_named_though_it_ends_late(tmp_path, monkeypatch):
    monkeypatch.delenv("BAGUA_HVD_GRACE_SECONDS")
    raised = tmp_path / "raised"

    def function():
        if int(os.environ["HOROVOD_RANK"]) == 0:
            import atexit

            atexit.register(time.sleep, 2)
            atexit.register(raised.touch)       # the last one registered runs first
            raise ValueError("cause")
        while not raised.exists():
            time.sleep(0.01)
        raise ValueError("consequence")

    with pytest.raises(RuntimeError, match="Process name: 0, Exit code: 1(?s:.*)ValueError: cause"):
        bagua_hvd.run(function, num_proc=2)


@pytest.fixture
def fake_hosts(fake_ssh, monkeypatch):
    for name, value in fake_ssh.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("BAGUA_HVD_GRACE_SECONDS", raising=False)


def test_the_cause_on_another_host_is_named_though_it_does_not_end(tmp_path, fake_hosts, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("BAGUA_HVD_GRACE_SECONDS", "1")

    def function():
        import atexit

        import torch

        import bagua_hvd.torch as hvd

        atexit.register(time.sleep, 30)     # runs last
        hvd.init()
        if hvd.rank() == 1:
            raise ValueError("cause")
        atexit.unregister(time.sleep)
        hvd.allreduce(torch.ones(3))

    with pytest.raises(RuntimeError, match="Process name: 1, Exit code: 1(?s:.*)ValueError: cause"):
        bagua_hvd.run(function, num_proc=2, hosts="far1:1,far2:1")


def test_an_exception_while_the_others_communicate():
    pytest.importorskip("torch")

    def function():
        import torch

        import bagua_hvd.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise ValueError("cause")
        hvd.allreduce(torch.ones(3))

    with pytest.raises(RuntimeError, match="Process name: 1, Exit code: 1(?s:.*)ValueError: cause"):
        bagua_hvd.run(function, num_proc=2)


def test_an_exception_that_cannot_be_printed():
    class Silent(Exception):
        def __str__(self):
            raise TypeError

    def action():
        raise Silent

    with pytest.raises(RuntimeError, match="Process name: 0, Exit code: 1(?s:.*)Silent"):
        bagua_hvd.run(on_rank(0, action), num_proc=2)


@pytest.mark.parametrize("code", [0, 3])
def test_sys_exit_leaves_no_result(code):
    with pytest.raises(RuntimeError, match=f"Process name: 1, Exit code: 1(?s:.*)SystemExit: {code}"):
        bagua_hvd.run(on_rank(1, lambda: sys.exit(code)), num_proc=2)


def test_a_rank_that_ends_without_a_word():
    with pytest.raises(RuntimeError, match="Process name: 0, Exit code: 0: .*no result"):
        bagua_hvd.run(lambda: os._exit(0))
    with pytest.raises(RuntimeError, match="Process name: 1, Exit code: 5$"):
        bagua_hvd.run(on_rank(1, lambda: os._exit(5)), num_proc=2)


def test_a_killed_rank():
    with pytest.raises(RuntimeError, match=r"Process name: 1, Exit code: 137 \(SIGKILL\)"):
        bagua_hvd.run(on_rank(1, lambda: os.kill(os.getpid(), signal.SIGKILL)), num_proc=2)


def test_a_result_that_cannot_be_pickled():
    with pytest.raises(RuntimeError, match="Rank 1: the result cannot be pickled: TypeError: .*lock"):
        bagua_hvd.run(on_rank(1, lambda: threading.Lock()), num_proc=2)


def test_a_result_that_cannot_be_unpickled():
    class Result:
        def __reduce__(self):
            return int, ("x",)

    with pytest.raises(RuntimeError, match="the result of rank 0 cannot be unpickled: ValueError"):
        bagua_hvd.run(lambda: Result())


def test_a_function_that_cannot_be_loaded(tmp_path, monkeypatch):
    (tmp_path / "soon_gone.py").write_text("def value():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import soon_gone

    (tmp_path / "soon_gone.py").unlink()
    with pytest.raises(RuntimeError, match="Rank 0: the function cannot be loaded: ModuleNotFoundError.*soon_gone"):
        bagua_hvd.run(soon_gone.value)


def test_a_function_that_cannot_be_pickled():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        bagua_hvd.run(lambda: lock)


# ---- arguments --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, error, words", [
    ({"hosts": "localhost:1", "hostfile": "x"}, ValueError, "hostfile and host_discovery_script exclude each other"),
    ({"use_gloo": True, "use_mpi": True}, ValueError, "use_gloo and use_mpi exclude each other"),
    ({"num_proc": 3, "hosts": "localhost:2"}, ValueError,
     r"Requested more processes \(3\) than there are available slots \(2\)"),
    ({"hosts": "localhost:x"}, ValueError, "expected name:slots"),
    ({"hosts": "elsewhere.invalid:1"}, RuntimeError, "host elsewhere.invalid cannot be reached"),
    ({"num_proc": 0}, ValueError, "num_proc=0 is not a number of processes"),
    ({"num_proc": "2"}, ValueError, "num_proc='2' is not a number of processes"),
    ({"start_timeout": 0}, ValueError, "start-timeout '0': expected an integer from 1 "),
    ({"executable": "/no/such/python"}, ValueError, "executable '/no/such/python'"),
    ({"hostfile": "/no/such/file"}, FileNotFoundError, "/no/such/file"),
    ({"max_num_proc": 1, "slots": 2}, ValueError, "max_num_proc, slots: these are for elastic jobs"),
    ({"min_num_proc": 1}, ValueError, "needs two hosts or a discovery script"),
    ({"max_num_proc": 1, "reset_limit": 2}, ValueError, "max_num_proc, reset_limit: these are for elastic jobs"),
    ({"host_discovery_script": "/no/such", "cooldown_range": (2, 1)}, ValueError, "blacklist-cooldown-range 2 1"),
    ({"host_discovery_script": "/no/such/script"}, RuntimeError, "'/no/such/script' cannot be run"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
def test_wrong_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        bagua_hvd.run(lambda: None, **arguments)


def test_what_is_no_function():
    with pytest.raises(TypeError, match="func is 3"):
        bagua_hvd.run(3)


@pytest.mark.parametrize("given, names", [
    (("eth0, eth1",), ["eth0", "eth1"]), (("eth0,, ", [" eth1", "eth2"]), ["eth0", "eth1", "eth2"]),
    (("", []), None), ((None, None), None)])
def test_names_of_interfaces(given, names):
    assert interface_names(*given) == names


def test_deprecated_names():
    with pytest.warns(DeprecationWarning, match="np is deprecated, use num_proc") as caught:
        assert bagua_hvd.run(lambda: 1, np=2) == [1, 1]
    assert caught[0].filename == __file__
    for old, sentence in (("min_np", "needs two hosts"), ("max_np", "max_num_proc: these are for elastic jobs")):
        with pytest.warns(DeprecationWarning, match=f"{old} is deprecated"), pytest.raises(ValueError, match=sentence):
            bagua_hvd.run(lambda: 1, **{old: 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bagua_hvd.run(lambda: 1, num_proc=1)


def test_the_bag_of_arguments():
    values = vars(_HorovodArgs())
    assert values.pop("num_proc") == 1
    assert values.keys() >= {"run_func", "nics", "hosts", "start_timeout"} and set(values.values()) == {None}
    assert bagua_hvd.runner._HorovodArgs is _HorovodArgs


def test_the_bag_of_arguments_can_be_run(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["baguarun", "-np", "1", "true"])
    assert vars(launch.parse_args()).keys() <= vars(_HorovodArgs()).keys()
    args = _HorovodArgs()
    args.num_proc, args.command = 2, ["echo", "hello"]
    launch._run(args)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]


# ---- the calling process ----------------------------------------------------------------------------------------

@pytest.fixture
def python():
    """Runs this code as the `__main__` of a Python, which has no `__file__`; kills it when the test ends."""
    popens = []
    # A background job of a script ignores SIGINT, and child processes would inherit that.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(code, **options):
        popens.append(subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **options))
        return popens[-1]

    try:
        yield start
    finally:
        signal.signal(signal.SIGINT, previous)
    for popen in popens:
        popen.kill()
        popen.communicate()


def test_functions_and_classes_of_main_without_a_file(python):
    popen = python("""
import bagua_hvd, os
assert "__file__" not in globals()
class Point:
    def __init__(self, x): self.x = x
def helper(x): return Point(x + OFFSET)
OFFSET = 5
def function(): return helper(int(os.environ["HOROVOD_RANK"]))
print("before")
results = bagua_hvd.run(function, num_proc=2)
assert all(type(p) is Point for p in results)
print([p.x for p in results])
""")
    assert popen.communicate(timeout=60) == ("before\n[5, 6]\n", "") and popen.returncode == 0


def test_the_ranks_of_a_script_for_horovod_import_horovod(python):
    popen = python("""
import bagua_hvd.as_horovod
import horovod
def function():
    import horovod.common.basics as basics
    return basics.__name__
print(horovod.run(function), horovod.runner.run(function))
""")
    assert popen.communicate(timeout=60)[0] == "['bagua_hvd.common.basics'] ['bagua_hvd.common.basics']\n"


def test_importing_the_package_is_light(python):
    popen = python("""
import sys, bagua_hvd
def loaded():
    return {name for name in sys.modules if name.startswith(("bagua_hvd.", "cloudpickle"))}
assert loaded() == {"bagua_hvd.core", "bagua_hvd.core.version"}, loaded()
import bagua_hvd.runner
assert loaded() == {"bagua_hvd.core", "bagua_hvd.core.version", "bagua_hvd.runner"}, loaded()
""")
    assert popen.communicate(timeout=60) == ("", "") and popen.returncode == 0


WAIT = """
import bagua_hvd, signal, sys, time
def function():
    print("up")
    time.sleep(60)
"""


def up(popen):
    """Waits until both ranks run."""
    assert [popen.stdout.readline().endswith("up\n") for _ in range(2)] == [True, True]


def test_ctrl_c(python):
    popen = python(WAIT + """
try:
    bagua_hvd.run(function, num_proc=2)
except KeyboardInterrupt:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("interrupted")
""")
    up(popen)
    popen.send_signal(signal.SIGINT)
    assert popen.communicate(timeout=60)[0] == "interrupted\n" and popen.returncode == 0


def test_sigterm_ends_the_caller_as_ever(python):
    popen = python(WAIT + "bagua_hvd.run(function, num_proc=2)")
    up(popen)
    popen.terminate()
    popen.communicate(timeout=60)
    assert popen.returncode == -signal.SIGTERM


def test_the_callers_own_handler_is_called(python):
    popen = python(WAIT + """
signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(7))
bagua_hvd.run(function, num_proc=2)
""")
    up(popen)
    popen.terminate()
    popen.communicate(timeout=60)
    assert popen.returncode == 7


def test_nobody_reads_the_output(python):
    popen = python("""
import bagua_hvd, os
def function():
    while True: print("x" * 1000)
try:
    bagua_hvd.run(function, num_proc=2)
except BrokenPipeError:
    os._exit(9)
""")
    popen.stdout.readline()
    popen.stdout.close()
    popen.stdout = None
    assert popen.wait(60) == 9


def test_ranks_die_with_a_killed_caller(python):
    popen = python(WAIT + "bagua_hvd.run(function, num_proc=2)")
    up(popen)
    popen.kill()
    popen.wait()
    wait_until(lambda: not processes_of(os.environ[MARK]))
