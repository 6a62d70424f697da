"""A job of fit() with KerasState(every_step=True): a worker is killed, a host joins, and one process replays it."""
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("keras")
pytest.importorskip("tensorflow")

import chaos  # noqa: E402
from launcher import wait_until  # noqa: E402

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

WORKER = Path(__file__).parents[1] / "support" / "keras_every_step_worker.py"
HOSTS = {"localhost": 1, "127.0.0.2": 1, "127.0.0.3": 1}


def replay(chain, steps):
    """(weights after this number of steps, the steps' members as in the logs)."""
    import tensorflow as tf

    from keras_every_step_worker import make_model, make_optimizer, share

    model = make_model()
    optimizer = make_optimizer()
    for place, parts in enumerate(chain):
        begin = next(iter(parts.values()))["step"]
        assert {part["step"] for part in parts.values()} == {begin}
        known = [part["completed"] for part in parts.values() if part["completed"] is not None]
        assert not known or max(known) == begin, f"step {begin} is lost or repeated: {known}"
        end = next(iter(chain[place + 1].values()))["step"] if place + 1 < len(chain) else steps
        members = sorted(part["rank"] for part in parts.values())
        for step in range(begin, end):
            gradients = []
            for rank in members:
                inputs, targets = share(step, rank)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(inputs, training=True) - targets) ** 2)
                gradients.append(tape.gradient(loss, model.trainable_variables))
            optimizer.apply([sum(of_ranks) / len(members) for of_ranks in zip(*gradients, strict=True)],
                            model.trainable_variables)
    return [weight.numpy() for weight in model.trainable_weights]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fit_loses_and_repeats_no_step(make_job, tmp_path, seed):
    generator = random.Random(seed)
    logs = tmp_path / "logs"
    logs.mkdir()
    job = make_job(HOSTS)
    job.start("--min-np", 1, "--max-np", 3, command=[WORKER], env={
        "TEST_LOG": str(logs), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"})
    job.wait_for("enter", 3, 400)
    killed = set()
    for _ in range(2):
        time.sleep(generator.uniform(0.1, 1))
        alive = sorted(chaos.read(logs).keys() - killed)
        victim = generator.choice(alive)
        os.kill(victim, signal.SIGKILL)
        killed.add(victim)
        wait_until(lambda: chaos.has_recovered(logs, victim, set(alive) - {victim}), 120)      # noqa: B023
        job.set_hosts({**HOSTS, "127.0.0.20": 1})
        wait_until(lambda: len(chaos.read(logs)) == 4 or "ended with exit code 1:" in job.text, 400)
        assert "ended with exit code 1:" not in job.text, job.text
    assert job.finish(120) == 0, job.text
    found = chaos.read(logs)
    steps = max(event["step"] for log in found.values() for event in log if event["event"] == "done") + 1
    expected = replay(chaos.generations(found), steps)
    ended = [np.load(file) for pid in found if (file := logs / f"{pid}.npz").exists()]
    assert ended, json.dumps(found)
    for its in ended:
        for weight, name in zip(expected, its.files, strict=True):
            np.testing.assert_allclose(its[name], weight, rtol=1e-7, atol=1e-7)
