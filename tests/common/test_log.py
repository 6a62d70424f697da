"""The logger bagua_hvd: levels, Horovod's format, the rank in each record, and messages of the core."""
import logging
import re
import time
from types import SimpleNamespace

import pytest

import bagua_hvd.torch as hvd
from bagua_hvd.core import log, variables
from bagua_hvd.core.context import Listener
from ranks import printed

pytestmark = pytest.mark.timeout(120)

LINE = re.compile(r"^\[(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}: )([TDIWEF]) (\S+):\d+\] \[(\d)\]: ", re.MULTILINE)


def be_a_job():
    hvd.init()
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize(("level", "letters"), [
    ("debug", {"D", "I"}), ("INFO", {"I"}), ("Warning", set()), (None, set()), ("error", set()), ("trace", {"D", "I"})])
def test_levels(run_ranks, level, letters):
    env = {} if level is None else {"HOROVOD_LOG_LEVEL": level}
    for rank, result in enumerate(run_ranks(2, be_a_job, env=env)):
        lines = LINE.findall(result.output)
        assert {letter for letter, _, _ in lines} == letters, result.output
        assert {number for _, _, number in lines} <= {str(rank)}
        assert (f"rank {rank} of 2 is in the job" in result.output) == ("I" in letters)


def test_without_the_time(run_ranks):
    env = {"HOROVOD_LOG_LEVEL": "info", "HOROVOD_LOG_HIDE_TIME": "1"}
    outputs = [result.output for result in run_ranks(2, be_a_job, env=env)]
    assert re.search(r"^\[I basics\.py:\d+\] \[1\]: rank 1 of 2 is in the job", outputs[1], re.MULTILINE)
    assert not LINE.search(outputs[0])


def test_a_wrong_level(monkeypatch):
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match="HOROVOD_LOG_LEVEL='loud': expected one of TRACE, DEBUG"):
        hvd.init()
    assert not hvd.is_initialized()


def test_what_the_core_says(run_ranks):
    """The timeline's disk is full: a message of the core appears in the job's log format."""
    first, second = run_ranks(2, be_a_job, env={"HOROVOD_TIMELINE": "/dev/full"})
    assert re.search(r"W timeline\.c:\d+\] \[0\]: cannot write the timeline /dev/full, which ends here: No space left",
                     first.output)
    assert LINE.findall(first.output) == [("W", "timeline.c", "0")] and LINE.findall(second.output) == []


def handle_records():
    import logging
    import threading

    handled = threading.Event()

    class Mine(logging.Handler):
        def emit(self, record):
            # Messages of the core are handled outside the engine, so a handler may use the job.
            hvd.allreduce(hvd.statistics().total.operations * __import__("torch").ones(1), process_set=mine)
            print(f"mine: {record.levelname} {record.rank} {record.filename} {record.getMessage():.60}", flush=True)
            handled.set()

    mine = hvd.ProcessSet([0])
    hvd.init(process_sets=[mine])
    if hvd.rank() == 0:
        logging.getLogger().addHandler(Mine())
    while hvd.rank() == 1 and "the other ranks wait for rank 1" not in printed():
        time.sleep(0.05)
    hvd.barrier()
    if hvd.rank() == 0:
        handled.wait(60)        # the handler needs the running job


def test_a_handler_of_the_script_gets_the_stall_report_and_may_use_the_job(run_ranks):
    first, second = run_ranks(2, handle_records, env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"})
    assert "mine: WARNING 0 stall.c One or more tensors were submitted" in first.output
    assert not LINE.search(first.output)
    assert LINE.search(second.output)


def test_a_handler_that_fails_does_not_end_the_log(monkeypatch, capsys):
    class Failing(logging.Handler):
        texts = []

        def emit(self, record):
            self.texts.append(record.getMessage())
            raise KeyError(record.getMessage())

    monkeypatch.setattr(log.logger, "handlers", [Failing()])
    context = SimpleNamespace(records=lambda: iter([(logging.WARNING, "stall.c", 1, "first"),
                                                    (logging.WARNING, "stall.c", 2, "second")]))
    listener = Listener(context, steps=lambda: 0)
    listener.close()
    assert Failing.texts == ["first", "second"]
    assert "KeyError: 'first'" in capsys.readouterr().err


def test_what_has_no_effect_says_so_once_on_rank_0(run_ranks):
    env = {"HOROVOD_CYCLE_TIME": "5", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "1", "HOROVOD_TORUS_ALLREDUCE": "0"}
    first, second = [result.output for result in run_ranks(2, be_a_job, env=env)]
    assert re.search(r"W basics\.py:\d+\] \[0\]: HOROVOD_CYCLE_TIME=5 has no effect: there is no cycle: ", first)
    assert first.count("has no effect") == 2 and "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE=1 has no effect" in first
    assert "has no effect" not in second


def test_every_variable_without_effect_has_a_sentence():
    ignored = [variable for variable in variables.TABLE.values() if variable.setter == "none"]
    sentences = variables.without_effect({variable.name: "1" for variable in ignored})
    assert [sentence.split("=")[0] for sentence in sentences] == [variable.name for variable in ignored]
    assert variables.without_effect({"HOROVOD_TORUS_ALLREDUCE": "0", "HOROVOD_RANK": "1"}) == []
