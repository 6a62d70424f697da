"""Faults while ranks negotiate in a tree, here a chain of relays: all ranks learn the same as in a star."""
import os
import re
import signal
import time

import pytest
import torch

import bagua_hvd.torch as hvd
from ranks import printed

CHAIN = {"BAGUA_HVD_NEGOTIATION": "tree", "BAGUA_HVD_NEGOTIATION_FANOUT": "1"}


def lose_the_relay():
    hvd.init()
    for step in range(5):
        hvd.allreduce(torch.ones(2), name=f"x{step % 2}")
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hvd.HorovodInternalError, match="rank 1 was lost"):
        hvd.allreduce(torch.ones(2), name="x0")


def test_a_relay_is_lost(run_ranks):
    assert [result.returncode for result in run_ranks(4, lose_the_relay, env=CHAIN, check=False)] == [0, -9, 0, 0]


def be_late():
    hvd.init()
    hvd.allreduce(torch.ones(2), name="first")
    while hvd.rank() == 2 and "the other ranks wait for rank 2" not in printed():
        time.sleep(0.05)
    hvd.allreduce(torch.ones(2), name="awaited")


def test_a_late_rank_is_named(run_ranks):
    results = run_ranks(3, be_late, env={**CHAIN, "HOROVOD_STALL_CHECK_TIME_SECONDS": "2"})
    assert re.search(r"^Missing ranks:\n2: \[allreduce\.awaited\]$", results[0].output, re.MULTILINE)
    assert "the other ranks wait for rank 2" in results[2].output and "be_late" in results[2].output


def leave_one_after_the_other():
    hvd.init()
    ends = hvd.add_process_set([0, 3])
    hvd.barrier()
    if hvd.rank() in (0, 3):
        for _ in range(30):
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="x", process_set=ends).tolist() == [2, 2]
        time.sleep(0.2 * hvd.rank())
    hvd.shutdown()


def test_relays_leave(run_ranks):
    run_ranks(4, leave_one_after_the_other, env={**CHAIN, "HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
