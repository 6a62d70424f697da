"""spark.run() on local[2]: results, output, failures; no process is left behind, and Spark retries nothing."""
import contextlib
import io
import os
import sys
import time

import pytest

pytest.importorskip("pyspark", reason="Spark is not installed: pip install pyspark pyarrow pandas")

import bagua_hvd.spark  # noqa: E402
from bagua_hvd.runner.common.util.timeout import TimeoutException  # noqa: E402
from bagua_hvd.spark.runner import places  # noqa: E402

pytestmark = pytest.mark.timeout(300)


def test_results_output_and_environment(spark):
    def main(factor, add=0):
        import os
        import sys

        import torch

        import bagua_hvd.torch as hvd

        hvd.init()
        print(f"out of {hvd.rank()}")
        print(f"err of {hvd.rank()}", file=sys.stderr)
        total = hvd.allreduce(torch.full((3,), float(hvd.rank() + 1)), op=hvd.Sum)
        return (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), (total * factor + add).tolist(),
                os.environ["OF_THE_USER"])

    stdout, stderr = io.StringIO(), io.StringIO()
    results = bagua_hvd.spark.run(main, (10,), {"add": 1}, num_proc=2, env={"OF_THE_USER": "x"}, stdout=stdout,
                                  stderr=stderr)
    assert results == [(rank, 2, rank, 2, [31.0] * 3, "x") for rank in range(2)]
    assert sorted(stdout.getvalue().splitlines()) == ["[0]<stdout>:out of 0", "[1]<stdout>:out of 1"]
    assert {"[0]<stderr>:err of 0", "[1]<stderr>:err of 1"} <= set(stderr.getvalue().splitlines())


@pytest.mark.parametrize("fails", [False, True])
def test_a_slow_stream_gets_all_output(spark, fails):
    class Slow(io.StringIO):
        def write(self, text):
            time.sleep(0.05)
            return super().write(text)

    def main():
        print(f"{'x' * 99}\n" * 60_000, flush=True)
        assert not fails

    stdout = Slow()
    with pytest.raises(RuntimeError, match="AssertionError") if fails else contextlib.nullcontext():
        bagua_hvd.spark.run(main, num_proc=1, stdout=stdout)
    assert stdout.getvalue().count(f"{'x' * 99}\n") == 60_000


def test_as_many_ranks_as_spark_has_slots(spark):
    assert bagua_hvd.spark.run(os.getpid) != [os.getpid()] * 2
    assert len(bagua_hvd.spark.run(os.getpid, stdout=io.StringIO())) == spark.sparkContext.defaultParallelism == 2


def test_an_executable_that_an_executor_lacks(spark):
    with pytest.raises(RuntimeError, match="cannot run /no/such/python: No such file or directory"):
        bagua_hvd.spark.run(os.getpid, num_proc=1, executable="/no/such/python")


@pytest.mark.parametrize("how, words", [
    ("raise", "ValueError: of rank 1"), ("exit", "Exit code: 7"),
    ("kill", r"(?s)Exit code: 137.*SIGKILL"),
    ("kill its task", "Rank 1: Spark's task on 127.0.0.1 is gone, and the rank with it: the executor was killed")])
def test_a_rank_that_fails_ends_the_job(spark, tmp_path, how, words):
    def main(folder):
        import os
        import time

        import bagua_hvd.torch as hvd

        hvd.init()
        with open(f"{folder}/{hvd.rank()}.{os.getpid()}", "w"):
            pass
        hvd.barrier()
        if hvd.rank() == 1:
            if how == "exit":
                os._exit(7)
            if how.startswith("kill"):
                os.kill(os.getpid() if how == "kill" else os.getppid(), 9)
                for _ in range(600):
                    print("still here", flush=True)
                    time.sleep(1)
            raise ValueError("of rank 1")
        time.sleep(600)         # a rank that does not notice the failure

    with pytest.raises(RuntimeError, match=words) as raised:
        bagua_hvd.spark.run(main, (str(tmp_path),), num_proc=2, stdout=io.StringIO(), stderr=io.StringIO())
    assert "Process name: 1" in str(raised.value)
    begun = [path.name.split(".") for path in tmp_path.iterdir()]
    assert sorted(rank for rank, _ in begun) == ["0", "1"]        # once each
    limit = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for _, pid in begun):
        assert time.monotonic() < limit, begun
        time.sleep(0.1)


def test_no_room(spark, monkeypatch):
    monkeypatch.setattr("bagua_hvd.spark.runner._NOTICE_SECONDS", 0)
    said = io.StringIO()
    with pytest.raises(TimeoutException, match="3 tasks at once for 2 s"):
        bagua_hvd.spark.run(os.getpid, num_proc=3, start_timeout=2, stderr=said)
    assert said.getvalue().count("waiting until Spark starts 3 tasks at once, for 2 s at most") == 1
    assert len(bagua_hvd.spark.run(os.getpid, num_proc=2)) == 2


def test_another_python(spark, monkeypatch, tmp_path):
    """Without PYSPARK_PYTHON, Spark takes some python3, which lacks this environment's packages."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("this Python is not of a virtual environment")
    outside = tmp_path / "python3"
    outside.write_text(f'#!/bin/sh\ncd /\nexec {os.path.realpath(sys.executable)} "$@"\n')
    outside.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(outside))
    with pytest.raises(RuntimeError, match=f"run '{outside}', which has no module .*: set PYSPARK_PYTHON") as raised:
        bagua_hvd.spark.run(os.getpid, num_proc=2)
    assert "\tat " not in str(raised.value)


def test_what_is_refused(spark, monkeypatch):
    with pytest.raises(ValueError, match="Spark starts the ranks"):
        bagua_hvd.spark.run(os.getpid, use_mpi=True)
    with pytest.raises(NotImplementedError, match="fixed number of tasks"):
        bagua_hvd.spark.run_elastic(os.getpid)
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    with pytest.raises(Exception, match="Could not find an active SparkContext"):
        bagua_hvd.spark.run(os.getpid)


def test_ranks_of_a_host_are_neighbours():
    ranks, slots = places(["a", "b", "a", "b", "b"])
    assert ranks == [0, 2, 1, 3, 4]
    assert [(slot.hostname, slot.local_rank, slot.local_size) for slot in slots] == [
        ("a", 0, 2), ("a", 1, 2), ("b", 0, 3), ("b", 1, 3), ("b", 2, 3)]
