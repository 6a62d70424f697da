"""Attacks the ports that ranks open until all are connected, while some ranks wait for others."""
import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest

import attacks
from bagua_hvd.job.probe import Requests
from bagua_hvd.job.rendezvous import Rendezvous
from launcher import wait_until
from ranks import job_environment

HERE = Path(__file__).parent
IDLE = 1000


class Ranks:
    """Ranks of a job of three, which start one by one."""

    def __init__(self, folder, transport):
        self._folder, self._transport = folder, transport
        self._secret = os.urandom(32)
        self._rendezvous = Rendezvous(self._secret)
        self.processes = []

    def start(self):
        environment = job_environment(len(self.processes), 3, self._rendezvous.port, self._secret, {
            "BAGUA_HVD_TRANSPORT": self._transport, "TEST_STOP": str(self._folder)})
        self.processes.append(subprocess.Popen([sys.executable, str(HERE / "summing.py")], env=environment,
                                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT))

    def close(self):
        for process in self.processes:
            process.kill()
            process.communicate()
        self._rendezvous.close()


@pytest.fixture
def make_ranks(tmp_path):
    made = []

    def make(transport):
        made.append(Ranks(tmp_path, transport))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


@pytest.mark.parametrize("transport, doors", [("tcp", 1), ("auto", 2)])
def test_ranks_find_each_other_behind_a_thousand_strangers(make_ranks, tmp_path, transport, doors):
    """A thousand idle connections, and some with invalid data, come before the expected ranks."""
    (tmp_path / "first").touch()
    (tmp_path / "second").touch()
    ranks = make_ranks(transport)
    ranks.start()
    ranks.start()
    addresses = []
    for process in ranks.processes:
        wait_until(lambda process=process: len(attacks.listening(process.pid)) == doors, 60)
        addresses += attacks.listening(process.pid)
    with attacks.idle(addresses[0], IDLE), attacks.idle(addresses[-1], IDLE, attacks.introduction_of(1, b"")), \
            attacks.idle(addresses[doors], 50, b"GET / HTTP/1.1\r\n\r\n"):
        for address in addresses:
            attacks.scan(address, 50)
        ranks.start()
        for process in ranks.processes:
            output, _ = process.communicate(timeout=100)
            assert process.returncode == 0 and output.count(b"right") == 2, output.decode()


def test_the_probe_of_addresses_answers_behind_strangers():
    requests, key, other = Requests(), *(base64.b64encode(letter * 32).decode() for letter in (b"k", b"l"))
    address = ("127.0.0.1", requests.listen("far1", key, None, [0])["port"])
    try:
        with attacks.idle(address, 300), attacks.idle(address, 20, b"slow"):
            attacks.scan(address, 50)
            wanted = [["far1", *address]]
            assert requests.reachable(wanted, key, 60) == wanted
            assert requests.reachable(wanted, other, 60) == requests.reachable([["far2", *address]], key, 60) == []
    finally:
        requests.close()
