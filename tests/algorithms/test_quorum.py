"""Outer steps with a quorum: the ranks it waits for, and ranks that are late, die, or are new."""
import os
import signal
import subprocess
import sys
import time
from base64 import b64encode
from pathlib import Path

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd import codecs
from bagua_hvd.algorithms import DiLoCo
from bagua_hvd.algorithms.fragments import outer_step
from bagua_hvd.algorithms.quorum import Contribution, Enter, QuorumRounds, QuorumServer, _Link
from bagua_hvd.job.server import join_address
from diloco import whole_diloco
from launcher import ROOT, wait_until
from ports import has_ipv6
from quorum_worker import make, parts_of, step

SECRET = b"s" * 32
THETA, M = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
ETA, MU = 0.7, 0.5


@pytest.fixture
def server():
    with QuorumServer(SECRET, "127.0.0.1") as server:
        yield server


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_server_for_both_families():
    with QuorumServer(SECRET, "::") as server:
        for host in "127.0.0.1", "::1":
            assert _Link(join_address(host, server.port), SECRET).response("w") is None


class Rank:
    """The messages of one rank to a server about one fragment."""

    def __init__(self, server, quorum, grace_s=0.0, codec=(), outer_lr=ETA, theta=THETA):
        self.link = _Link(f"127.0.0.1:{server.port}", SECRET)
        self.quorum, self.grace_s = quorum, grace_s
        values = np.stack([theta, np.ones_like(theta)])
        self.link.send(Enter("w", values.nbytes, values.dtype.str, outer_lr, MU, list(codec)), values.tobytes())
        self.state = self.receive("state")

    def send(self, number, delta, weight=1.0):
        content = np.full(4, delta, np.float32).tobytes()
        self.link.send(Contribution("w", len(content), number, float(weight), float(self.quorum),
                                    float(self.grace_s)), content)

    def receive(self, kind):
        message, content = wait_until(lambda: self.link.response("w"))
        assert message.kind == kind
        return message.number, np.frombuffer(content, np.float32)

    def receives(self, kind, number, values):
        got, content = self.receive(kind)
        assert got == number
        np.testing.assert_allclose(content, values, rtol=1e-6)

    def is_asked(self, number):
        wait_until(lambda: self.link.begun.get("w") == number)


def after(*deltas):
    theta, m = THETA.copy(), M.copy()
    for delta in deltas:
        outer_step(theta, m, np.full(4, delta, np.float32), ETA, MU)
    return np.concatenate([theta, m])


def test_weights_and_who_is_late(server):
    ranks = [Rank(server, 2) for _ in range(3)]
    ranks[0].send(0, 1, weight=3)
    for rank in ranks[1:]:
        rank.is_asked(0)
    ranks[1].send(0, 5, weight=1)       # this reaches the quorum, without grace
    for rank in ranks[:2]:
        rank.receives("mean", 0, [2] * 4)
    ranks[2].send(0, 7)
    ranks[2].receives("state", 1, after(2))
    ranks[2].send(1, 7)                 # in time now, so the server asks the others
    for rank in ranks[:2]:
        rank.is_asked(1)
    ranks[0].send(1, 3)
    for rank in ranks[::2]:
        rank.receives("mean", 1, [5] * 4)
    assert np.array_equal(Rank(server, 2).state[1], after(2, 5))        # a new rank
    assert ranks[1].link.response("w") is None


def test_nobody_waits_for_the_dead(server):
    ranks = [Rank(server, 3, grace_s=1000) for _ in range(3)]
    ranks[0].send(0, 1)
    ranks[1].send(0, 3)
    ranks[2].is_asked(0)
    ranks[2].link.close()
    for rank in ranks[:2]:
        rank.receives("mean", 0, [2] * 4)
    ranks[0].send(1, 1)
    ranks[1].link.close()
    ranks[0].receives("mean", 1, [1] * 4)
    new = Rank(server, 1.0)
    assert new.state[0] == 2
    server.close = lambda: None
    QuorumServer.close(server)
    with pytest.raises(RuntimeError, match=r"the quorum server at 127.0.0.1:\d+ has ended"):
        new.receive("mean")


def test_a_share(server):
    ranks = [Rank(server, 0.5) for _ in range(4)]
    ranks[0].send(0, 2)
    ranks[1].is_asked(0)
    assert ranks[0].link.response("w") is None
    ranks[1].send(0, 4)
    ranks[0].receives("mean", 0, [3] * 4)


def test_a_share_of_those_who_are_left(server):
    ranks = [Rank(server, 0.5) for _ in range(4)]
    ranks[0].send(0, 2)
    ranks[1].is_asked(0)
    for rank in ranks[2:]:
        rank.link.close()
    ranks[0].receives("mean", 0, [2] * 4)       # half of the two that remain


def test_another_training_is_refused(server):
    """The server refuses other settings and serves its ranks further; a rank that enters gets the current theta."""
    first = Rank(server, 1)
    for other, sentence in (({"theta": np.ones(9, np.float32)}, "nbytes is 32 on the server and 72 on this rank"),
                            ({"theta": np.ones(3, np.float32)}, "nbytes is 32 on the server and 24 on this rank"),
                            ({"theta": np.ones(2)}, "dtype is '<f4' on the server and '<f8' on this rank"),
                            ({"outer_lr": 0.5}, "outer_lr is 0.7 on the server and 0.5 on this rank"),
                            ({"codec": codecs.sign}, "codec is .* on the server and .* on this rank")):
        with pytest.raises(ValueError, match=rf":{server.port} has other settings for w: {sentence}.*: start a new"):
            Rank(server, 1, **other)
    first.send(0, 2)
    first.receives("mean", 0, [2] * 4)
    assert np.array_equal(Rank(server, 1, theta=THETA + 1).state[1], after(2))


def test_grace(server):
    ranks = [Rank(server, 1, grace_s=1000) for _ in range(2)]
    ranks[0].send(0, 1)
    ranks[1].send(0, 3)                 # all have contributed: the grace period is cut short
    ranks[0].receives("mean", 0, [2] * 4)


def one_stands_still(folder, streaming):
    """Rank 2 pauses while the others make rounds; its late contribution still counts."""
    hvd.init()
    algorithm = DiLoCo(6, fragments=2, overlap_steps=2, quorum=2, grace_s=0.05, codec=codecs.block(8)) \
        if streaming else whole_diloco(4, quorum=2, grace_s=0.05)
    model, optimizer = make(algorithm)
    generator = torch.Generator().manual_seed(hvd.rank())
    signs = Path(folder)
    step(model, optimizer, generator)
    if hvd.rank() == 2:
        wait_until(lambda: len(list(signs.iterdir())) == 2)
    while not (signs / "2").exists():
        step(model, optimizer, generator)
        if parts_of(optimizer)[0].number >= (7 if hvd.rank() == 2 else 4):
            (signs / str(hvd.rank())).touch()
    algorithm.abort()
    step(model, optimizer, generator)
    hvd.consensus(model)
    # Ranks that took part in the same round have the same theta.
    found = hvd.allgather_object([(part.number, part.outer()[0].tobytes()) for part in parts_of(optimizer)])
    for of_ranks in zip(*found, strict=True):
        by_number = {}
        for number, theta in of_ranks:
            assert by_number.setdefault(number, theta) == theta
    algorithm.resume()
    step(model, optimizer, generator)
    assert len(set(hvd.allgather_object(parts_of(optimizer)[0].outer()[0].tobytes()))) == 1
    algorithm.abort()


@pytest.mark.parametrize("streaming", [False, True])
def test_one_stands_still(run_ranks, tmp_path, streaming):
    signs = tmp_path / "signs"
    signs.mkdir()
    run_ranks(3, one_stands_still, arguments={"folder": str(signs), "streaming": streaming})


def enters_late():
    """The first round waits for a rank that enters late; settings that differ are an error on all ranks."""
    hvd.init()
    enter = QuorumRounds._enter

    def late(self):
        time.sleep(hvd.rank())
        return enter(self)

    QuorumRounds._enter = late
    model, optimizer = make(DiLoCo(2, quorum=2, codec=None))
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(3):
        step(model, optimizer, generator)
    found = hvd.allgather_object([(part.number, part.outer()[0].tobytes()) for part in parts_of(optimizer)])
    assert found[0] == found[1] and max(number for number, _ in found[0]) == 1
    optimizer.algorithm.abort()
    model, optimizer = make(DiLoCo(2, quorum=2, outer_lr=0.5 + 0.1 * hvd.rank()))
    with pytest.raises(ValueError, match=r"rank [01]: the quorum server at .*: outer_lr is 0\.\d on the server and"):
        step(model, optimizer, generator)


def test_enters_late(run_ranks):
    run_ranks(2, enters_late)


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_jobs_come_and_go(tmp_path):
    """Three jobs of one rank each, one under torchrun. Two ranks are killed: torchrun restarts its own; the third job
    continues."""
    environment = {**os.environ, "_HOROVOD_SECRET_KEY": b64encode(SECRET).decode(), "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": str(ROOT)}
    started = []

    def start(*command, **variables):
        started.append(subprocess.Popen([sys.executable, *map(str, command)], env={**environment, **variables},
                                        stdout=subprocess.PIPE))
        return started[-1]

    server = start("-m", "bagua_hvd.runner.quorum_server")
    address = f"127.0.0.1:{server.stdout.readline().split()[-1].decode()}"

    def job(name, *launcher):
        return start(*launcher, ROOT / "tests/support/quorum_worker.py", tmp_path / name,
                     BAGUA_HVD_QUORUM_SERVER=address)

    def rounds(name):
        """{pid: {number: theta}} of a job."""
        file = tmp_path / name
        found = {}
        for line in file.read_text().split("\n")[:-1] if file.exists() else []:
            pid, number, theta = line.split()
            found.setdefault(int(pid), {})[int(number)] = theta
        return found

    def last(name):
        return max(number for thetas in rounds(name).values() for number in thetas)

    try:
        alone, going_on = job("alone"), job("going on")
        job("torchrun", "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "3",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
        wait_until(lambda: all(rounds(name) and last(name) > 3 for name in ("alone", "going on", "torchrun")), 300)
        killed, = rounds("torchrun")
        alone.kill()
        os.kill(killed, signal.SIGKILL)
        before = last("going on")
        wait_until(lambda: last("going on") > before + 3, 300)
        wait_until(lambda: len(rounds("torchrun")) == 2 and last("torchrun") > before + 6, 300)
        again = rounds("torchrun")
        del again[killed]
        thetas, = again.values()
        assert min(thetas) > before                     # it began at the other job's state
        other, = rounds("going on").values()            # of a single process
        both = thetas.keys() & other.keys()
        assert both and all(thetas[number] == other[number] for number in both)
        assert going_on.poll() is None
    finally:
        for process in reversed(started):
            process.terminate()         # torchrun ends its worker
            process.wait()


def test_bad_arguments():
    for arguments, sentence in (
            ({"quorum": 0}, "quorum=0: expected an integer of 1 or more"),
            ({"quorum": 2.5}, "quorum=2.5: expected an integer of 1 or more"),
            ({"quorum": 2, "grace_s": -1}, "grace_s=-1: expected seconds, 0 or more"),
            ({"quorum": 2, "full_steps": 64}, "full_steps=64: these need all ranks"),
            ({"quorum": 2, "error_feedback": True}, "error_feedback=True: with a quorum, no rank knows")):
        with pytest.raises(ValueError, match=sentence):
            DiLoCo(**arguments)
    assert subprocess.run([sys.executable, "-m", "bagua_hvd.runner.quorum_server"], capture_output=True, text=True,
                          env={**os.environ, "_HOROVOD_SECRET_KEY": ""}).stderr.startswith(
                              "_HOROVOD_SECRET_KEY is not set: export _HOROVOD_SECRET_KEY=$(openssl rand -base64 32)")
