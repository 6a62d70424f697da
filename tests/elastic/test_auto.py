"""Auto in an elastic job: a worker is killed between the decision and the switch, and new ones join."""
from pathlib import Path

import pytest

from elastic_job import with_rank

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(200)

WORKER = Path(__file__).with_name("auto_worker.py")
A, B, C = "localhost", "127.0.0.2", "127.0.0.3"
PLAN = "float16"


def start(make_job, hosts):
    job = make_job(hosts)
    job.start("--min-np", 1, "--max-np", 3, command=[WORKER], env={"OMP_NUM_THREADS": "1"})
    return job


def ends_alike(job, size):
    assert job.finish(90) == 0, job.text
    done = job.of("done")
    assert [(event.words["equal"], event.words["plan"]) for event in done] == [("True", PLAN)] * size, job.text


def test_a_rank_killed_in_the_middle_of_a_switch(make_job):
    """The decision stays valid for the survivor and for the replacement of the lost rank."""
    job = start(make_job, {A: 1, B: 1})
    decided = job.wait_for("decided", 2)
    assert len({event.words["step"] for event in decided}) == 1
    job.kill(with_rank(decided, 1))
    alone = job.wait_for("enter", size=1)[0]
    assert alone.words["pid"] == with_rank(decided, 0).words["pid"]
    job.set_hosts({A: 1, C: 1})
    job.wait_for("committed", 20, size=2, plan=PLAN)
    assert not [event for event in job.of("committed", plan="gradient_allreduce")
                if int(event.words["step"]) > int(decided[0].words["step"])]
    ends_alike(job, 2)


def test_a_rank_that_joins_takes_up_the_plan(make_job):
    job = start(make_job, {A: 1, B: 1})
    job.wait_for("committed", 4, size=2, plan=PLAN)
    job.set_hosts({A: 1, B: 1, C: 1})
    job.wait_for("committed", 30, size=3, plan=PLAN)
    assert not job.of("committed", size=3, plan="gradient_allreduce")
    ends_alike(job, 3)
