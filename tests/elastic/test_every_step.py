"""Whole jobs with every_step=True: workers are killed and stopped at random, hosts join and leave. See chaos.py."""
import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

import chaos  # noqa: E402
from elastic_job import with_rank  # noqa: E402
from launcher import wait_until  # noqa: E402

pytestmark = pytest.mark.timeout(900)

A, B, C = "localhost", "127.0.0.2", "127.0.0.3"


@pytest.mark.parametrize("seed", [6, 29, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6))])
def test_no_step_is_lost_or_repeated(tmp_path, seed):
    chaos.Chaos(("mlp", "gru")[seed % 2], random.Random(seed), tmp_path).run()


def test_the_others_train_while_a_worker_starts(make_job, tmp_path):
    """They learn of it when it calls init(), and repeat at most their current step."""
    logs, go = tmp_path / "logs", tmp_path / "go"
    logs.mkdir()
    job = make_job({A: 1, B: 1})
    chaos.start(job, logs, "mlp", 1, 3, TEST_LATE_HOST=C, TEST_GO=str(go))
    old = [int(event.words["pid"]) for event in job.wait_for("enter", 2, 240, size=2)]

    def completed():
        return min(sum(event["event"] == "done" for event in chaos.read(logs)[pid]) for pid in old)

    job.set_hosts({A: 1, B: 1, C: 1})
    job.wait_for("loads", 1, 240)
    before = completed()
    wait_until(lambda: completed() >= before + 50, 240)
    assert job.of("enter", size=3) == []
    go.touch()
    job.wait_for("enter", 3, 240, size=3)
    assert job.finish(120) == 0, job.text
    found, _ = chaos.check(job, logs, "mlp")
    for pid in old:
        tried = [event["step"] for event in found[pid] if event["event"] == "try"]
        assert len(tried) - len(set(tried)) <= 1


def test_hosts_come_and_go(make_job, tmp_path):
    """Rank 0's host is removed while another one joins; no worker calls a collective to learn of it."""
    logs = tmp_path / "logs"
    logs.mkdir()
    job = make_job({A: 1, B: 1})
    chaos.start(job, logs, "mlp", 1, 3)
    two = job.wait_for("enter", 2, 240, size=2)
    job.set_hosts({A: 1, B: 1, C: 1})
    three = job.wait_for("enter", 3, 240, size=3)
    job.set_hosts({B: 1, C: 1})
    again = job.wait_for("enter", 4, 240, size=2)[2:]
    assert with_rank(again, 0).words["pid"] == with_rank(two, 1).words["pid"] == with_rank(three, 1).words["pid"]
    assert with_rank(again, 1).words["pid"] == with_rank(three, 2).words["pid"]
    assert job.finish(120) == 0, job.text
    chaos.check(job, logs, "mlp")
    assert "blacklisted" not in job.text
    assert Path(logs / f"{with_rank(three, 0).words['pid']}.pt").exists() is False
