"""Commits of results on GPUs: elastic states save nothing from an operation that ended but failed later on the GPU.

Driver and NCCL are fakes, as in test_nccl.py. A CPU model poses as the weights that depend on the results.
"""
import os
import signal
import threading

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from device_arrays import FakePlacement, fake_cuda, own_device


def _train(steps, dies=False):
    """Commits after every step, until one fails; prints the state that is kept then."""
    hvd.init()
    placement = FakePlacement(own_device(0))
    context = hvd.mpi_ops.basics.context()
    model = torch.nn.Linear(1, 1, bias=False)
    state = hvd.elastic.TorchState(model=model, step=0)
    array = placement.array(np.zeros(20_000, np.float32))
    try:
        for step in range(1, steps + 1):
            context.post(native.ALLREDUCE, f"step.{step}", [array.view(array)]).wait()
            with torch.no_grad():
                model.weight.fill_(step)
            state.step = step
            if dies and step == 3 and hvd.rank() == 1:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
            state.commit()
    except HorovodInternalError as error:
        print("failed:", error)
    state.restore()
    print("kept", state.step, model.weight.item())


def _own_gpus(n, **more):
    return [{"BHVD_FAKE_CUDA_UUID": f"gpu{rank}", **more} for rank in range(n)]


def test_all_is_kept_where_nothing_fails(run_ranks):
    for rank in run_ranks(2, _train, arguments={"steps": 4}, env=_own_gpus(2)):
        assert rank.output.splitlines() == ["kept 4 4.0"]


def test_nothing_is_kept_of_a_step_that_nccl_failed(run_ranks):
    """On the rank that sees the error, and on the other, on which the operation has ended by then."""
    env = _own_gpus(2)
    env[1]["BHVD_FAKE_NCCL_FAIL_AFTER"] = "3"
    for rank in run_ranks(2, _train, arguments={"steps": 5}, env=env):
        failed, kept = rank.output.splitlines()
        assert "failed: rank 1: NCCL 2.21.5" in failed
        assert kept == "kept 2 2.0"


def test_nothing_is_kept_of_a_step_that_a_lost_rank_left_unfinished(run_ranks):
    """The other rank's GPU hangs, and its process dies after the operation has ended on both ranks."""
    env = _own_gpus(2)
    env[1] |= {"BHVD_FAKE_NCCL_FAIL_AFTER": "3", "BHVD_FAKE_NCCL_HANG": "1"}
    first, _ = run_ranks(2, _train, arguments={"steps": 5, "dies": True}, env=env, check=False)
    failed, kept = first.output.splitlines()
    assert "failed: rank 1 was lost" in failed
    assert kept == "kept 2 2.0"


def _results_cannot_be_copied_back():
    hvd.init()
    placement = FakePlacement()
    hvd.wait_for_gpus()
    array = placement.array(np.ones(4, np.float32))
    operation = hvd.mpi_ops.basics.context().post(native.ALLREDUCE, "x", [array.view(array)])
    while not operation.done():
        pass
    with pytest.raises(HorovodInternalError, match="GPU 0: work of earlier operations failed: an illegal memory"):
        hvd.wait_for_gpus()
    assert fake_cuda().copies() == 3


def test_an_error_of_the_gpu_after_the_operations_end(run_ranks):
    """Three copies: to the tensor, to the host, and back; the last one fails."""
    run_ranks(1, _results_cannot_be_copied_back, env=[{"BHVD_FAKE_CUDA_FAIL_AFTER": "3"}])


def test_without_gpus_nothing_is_waited_for():
    hvd.shutdown()
    hvd.wait_for_gpus()
    hvd.init()
    hvd.allreduce(torch.ones(3))
    hvd.wait_for_gpus()
    hvd.shutdown()
