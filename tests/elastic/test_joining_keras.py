"""A rank joins a job of TensorFlow, and makes its Reducers in another order than the others."""
from pathlib import Path

import pytest

pytest.importorskip("keras")
pytest.importorskip("tensorflow")

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

WORKER = Path(__file__).parents[1] / "support" / "keras_joining_worker.py"


@pytest.mark.parametrize("state", ["TensorFlowState", "TensorFlowKerasState"])
def test_a_rank_that_joins_makes_reducers_in_another_order(make_job, state):
    job = make_job({"localhost": 1})
    job.start("--min-np", 1, "--max-np", 2, command=[WORKER], env={
        "TEST_STATE": state, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"})
    job.wait_for("alone", 1, 120, step=5)
    job.set_hosts({"localhost": 1, "127.0.0.2": 1})
    job.wait_for("done", 2, 120, size=2)
    assert job.finish() == 0, job.text
