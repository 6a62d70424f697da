"""python -m tests.laboratory: hosts that are network namespaces, and options for hosts that cannot be created."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(240)

from tests.laboratory import __main__ as laboratory  # noqa: E402
from tests.laboratory import hosts  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--rate", "1gbit"], "--rate shapes the links between hosts: give --hosts too"),
    (["--delay", "5"], "--delay shapes the links between hosts: give --hosts too"),
    (["--hosts", "2", "--delay", "-1"], "'-1' is not a number of milliseconds, 0 to 9999"),
    (["--hosts", "2", "--delay", "soon"], "'soon' is not a number of milliseconds"),
    (["--hosts", "2", "-n", "3"], "--hosts 2: 3 ranks cannot be spread evenly over them"),
    (["--hosts", "2", "--rate", "fast"], "--rate: 'fast' is not a rate such as 1gbit, nor none"),
    (["--negotiation", "2", "--many"], "--negotiation is a measurement of its own"),
])
def test_bad_options(arguments, sentence, capsys, monkeypatch):
    monkeypatch.delenv("HOROVOD_SIZE", raising=False)
    with pytest.raises(SystemExit) as ended:
        laboratory.parse_options(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_not_in_a_running_job(capsys, monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    with pytest.raises(SystemExit):
        laboratory.parse_options([])
    assert "run it without baguarun" in capsys.readouterr().err


@pytest.mark.parametrize(("user", "tools", "sentence"), [
    (0, [], "--hosts needs ip and tc, which are not installed: install iproute2"),
    (0, ["ip"], "--hosts needs tc, which is not installed: install iproute2"),
    (1000, ["ip", "tc"], "--hosts makes network namespaces, which only root may: run it with sudo"),
])
def test_hosts_that_cannot_be_made(user, tools, sentence, capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name if name in tools else None)
    monkeypatch.setattr("os.geteuid", lambda: user)
    with pytest.raises(SystemExit) as ended:
        laboratory.parse_options(["--hosts", "2"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def _orphans():
    """Namespaces whose creators have ended. Those of other running tests are not among them."""
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
    return [name for name in names if (maker := re.match(rf"{hosts.PREFIX}(\d+)-", name))
            and not Path("/proc", maker[1]).exists()]


def _can_make_hosts():
    if hosts.why_impossible():
        return False
    probe = "ip link add probe type bridge && tc qdisc add dev probe root tbf rate 1gbit burst 256kb latency 50ms"
    return subprocess.run(["unshare", "--net", "sh", "-c", probe], capture_output=True).returncode == 0


@pytest.mark.skipif(not _can_make_hosts(), reason="network namespaces need root, iproute2 and a kernel with bridges")
@pytest.mark.long
@pytest.mark.parametrize(("backends", "delay"), [("bagua", ["--delay", 1]), ("bagua", []), ("bagua,gloo", [])])
def test_ranks_on_hosts_of_their_own(backends, delay):
    """Real namespaces: ranks of one host share memory, those of two use the shaped link, and nothing is left behind."""
    command = [sys.executable, "-m", "tests.laboratory", "--hosts", "2", "-n", "4", "--rate", "1gbit", "--sizes",
               "4,64K", "--backends", backends, "--rounds", "1", "--iterations", "2", *map(str, delay)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert "4 ranks on 2 hosts, links 1gbit" + (", 1 ms one way," if delay else ",") in ended.stdout
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in ended.stdout.splitlines()
            if line.startswith("|") and "---" not in line]
    assert [row[:3] for row in rows[1:]] == [
        ["allreduce", size, backend] for size in ("4 B", "64 KiB") for backend in backends.split(",")]
    assert _orphans() == []


