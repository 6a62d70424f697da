"""Attacks every open port of a running job; the job continues, and its launcher's memory does not grow."""
import base64
import sys
import threading
from pathlib import Path

import psutil
import pytest

import attacks
from bagua_hvd.job import channel
from bagua_hvd.job.rendezvous import Register
from elastic_job import ElasticJob
from launcher import wait_until

pytestmark = pytest.mark.timeout(120)
HERE = Path(__file__).parent
IDLE = 1000
STRANGERS_MAX = 256                         # maximum for each service at a time
GROWTH_MAX_NBYTES = 16 << 20                # far less than the total of the sent bytes


def secret_of(pid):
    """The job's secret, from a rank's environment, for an attacker who was in the job."""
    variables = dict(each.split(b"=", 1) for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if each)
    return base64.b64decode(variables[b"_HOROVOD_SECRET_KEY"])


def attack(address, secret, proven_says):
    """Runs all attacks at once; returns after 1,000 idle connections were opened and closed, and all attackers left."""
    connection, recorded = attacks.proven(address, secret)
    connection.close()
    with attacks.idle(address, IDLE), attacks.idle(address, 50, attacks.hello_of()):
        for seed in range(5):
            attacks.strangers(address, seed)
        attacks.replay(address, recorded)
        attacks.scan(address, 200)
        for said in proven_says:
            connection, _ = attacks.proven(address, secret)
            with connection:
                try:
                    connection.sendall(said)
                except ConnectionError:
                    pass
                assert attacks.heard(connection) == b""


NONSENSE = [b"[" * 60_000 + b"\n", b"{" * 100_000, b"[1]\n", b"\xff" * 28 + b"\n", channel.encode(channel.Hello(99)),
            *(channel.encode(Register("nope", 0, size, "?", 1.0, 1.0)) for size in (2, 1 << 31))]


def start(launcher, *flags, env=None):
    return launcher.start(*flags, sys.executable, "-u", HERE / "summing.py",
                          env={"TEST_STOP": str(launcher.folder), **(env or {})})


def test_rendezvous(launcher):
    popen = start(launcher, "-np", 3)
    lines = []
    threading.Thread(target=lambda: lines.extend(iter(popen.stdout.readline, b"")), daemon=True).start()

    def said(text):
        return [line for line in list(lines) if text in line]

    wait_until(lambda: len(said(b"up first")) == 3 or popen.poll() is not None, 60)
    assert popen.poll() is None, popen.stderr.read()
    ranks = [int(line.split()[-1]) for line in said(b"up first")]
    assert [attacks.listening(pid) for pid in ranks] == [[], [], []]        # after the rendezvous no port is needed
    (address,) = attacks.listening(popen.pid)
    secret, job = secret_of(ranks[0]), psutil.Process(popen.pid)
    attack(address, secret, NONSENSE)            # buffers that grow only once
    descriptors, memory = job.num_fds(), job.memory_info().rss
    attack(address, secret, NONSENSE)
    assert job.memory_info().rss < memory + GROWTH_MAX_NBYTES
    with attacks.idle(address, IDLE):
        # The service closes the excess connections when it reaches them.
        wait_until(lambda: job.num_fds() <= descriptors + STRANGERS_MAX)
        (launcher.folder / "first").touch()
        wait_until(lambda: len(said(b"up second")) == 3 or popen.poll() is not None, 60)
        assert popen.poll() is None, popen.stderr.read()
    wait_until(lambda: job.num_fds() <= descriptors)
    (launcher.folder / "second").touch()
    assert popen.wait(60) == 0, popen.stderr.read()
    wait_until(lambda: len(said(b"right")) == 6)


@pytest.mark.long
def test_elastic(launcher):
    """The driver's port and the rendezvous server's; a worker that starts during the attack joins."""
    job = ElasticJob(launcher, {"localhost": 2})
    job.start("-np", 2, "--max-np", 3, command=[HERE.parent / "elastic" / "plain_worker.py"])
    worker = job.wait_for("enter", 2)[0].words
    process = psutil.Process(job.pid)
    secret = secret_of(int(worker["pid"]))
    addresses = attacks.listening(job.pid)
    assert len(addresses) == 2
    for address in addresses:
        attack(address, secret, NONSENSE[:4])
    descriptors, memory = process.num_fds(), process.memory_info().rss
    for address in addresses:
        attack(address, secret, NONSENSE[:4])
    assert process.memory_info().rss < memory + GROWTH_MAX_NBYTES
    with attacks.idle(addresses[0], IDLE), attacks.idle(addresses[1], IDLE):
        wait_until(lambda: process.num_fds() <= descriptors + 2 * STRANGERS_MAX)
        job.set_hosts({"localhost": 3})
        job.wait_for("enter", rank=2)
    wait_until(lambda: process.num_fds() <= descriptors + 10)       # those of the new worker
    assert job.finish() == 0
