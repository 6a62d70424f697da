"""A small real model trains to its accuracy while a worker is killed, rank 0 is lost, and hosts join and leave."""
from pathlib import Path

import pytest

from elastic_job import with_rank

pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")
datasets = pytest.importorskip("sklearn.datasets")

pytestmark = pytest.mark.timeout(300)

WORKER = Path(__file__).with_name("digits_worker.py")
A, B, C = "localhost", "127.0.0.2", "127.0.0.3"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The path of the shuffled data, as an archive that loads fast."""
    images, labels = datasets.load_digits(return_X_y=True)
    order = numpy.random.default_rng(0).permutation(len(labels))
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    numpy.savez(path, images=(images / 16).astype(numpy.float32).reshape(-1, 1, 8, 8)[order], labels=labels[order])
    return path


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "async",
                                       pytest.param("auto", marks=pytest.mark.long),
                                       pytest.param("diloco", marks=pytest.mark.long)])
def test_trains_on(make_job, digits, algorithm):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 1, "--max-np", 2, command=[WORKER, algorithm],
              env={"TEST_DIGITS": str(digits), "OMP_NUM_THREADS": "1"})
    first = job.wait_for("enter", 2, size=2)
    job.wait_for("committed", 4)
    committed = job.committed()
    job.kill(with_rank(first, 0))
    alone = job.wait_for("enter", size=1)[0]        # its optimizer was made for two ranks
    assert alone.words["pid"] == with_rank(first, 1).words["pid"]
    assert int(alone.words["step"]) >= committed
    job.set_hosts({B: 1, C: 1})
    second = job.wait_for("enter", 4, size=2)[2:]
    assert with_rank(second, 0).words["pid"] == alone.words["pid"]
    assert len({(event.words["step"], event.words["done"]) for event in second}) == 1
    job.wait_for("committed", len(job.of("committed")) + 4)
    job.set_hosts({C: 1})
    alone = job.wait_for("enter", 2, size=1)[1]     # it joined later
    assert alone.words["pid"] == with_rank(second, 1).words["pid"]
    assert job.finish(150) == 0, job.text
    done, = job.of("done")
    assert done.words["equal"] == "True" and float(done.words["accuracy"]) > 0.93
    assert "removed from elastic job" in job.text
    if algorithm == "bytegrad":
        assert "ByteGrad: the set of ranks changed: per-rank state is reset" in job.text


def test_two_ranks_end_equal(make_job, digits):
    job = make_job({A: 1})
    job.start("--min-np", 1, command=[WORKER, "gradient_allreduce"],
              env={"TEST_DIGITS": str(digits), "OMP_NUM_THREADS": "1"})
    job.wait_for("committed", 2)        # its optimizer was made for one rank
    job.set_hosts({A: 1, B: 1})
    together = job.wait_for("enter", 2, size=2)
    assert 0 < int(together[0].words["step"]) == int(together[1].words["step"])
    assert job.finish(150) == 0, job.text
    assert [event.words["equal"] for event in job.of("done")] == ["True", "True"]
    assert len({event.words["accuracy"] for event in job.of("done")}) == 1
    assert float(job.of("done")[0].words["accuracy"]) > 0.93
