"""The stall inspector: which tensors wait for which ranks, the last operations of those, and where they are."""
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bagua_hvd.torch as hvd
import bagua_hvd.torch.distributed  # noqa: F401  (registers the backend)
from ranks import printed

WARNING = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}


def dawdle():
    """Waits until this rank has printed that the others wait for it."""
    while "the other ranks wait for rank" not in printed():
        time.sleep(0.05)


def wait_for_the_last_rank():
    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    if hvd.rank() == hvd.size() - 1:
        dawdle()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="awaited").tolist() == [hvd.size()] * 2


def test_a_late_rank_says_where_it_is(run_ranks):
    first, middle, last = [result.output for result in run_ranks(3, wait_for_the_last_rank, env=WARNING)]
    assert "are waiting for remainder of ranks for more than 1 seconds" in first
    assert re.search(r"^Missing ranks:\n2: \[allreduce\.awaited\]$", first, re.MULTILINE)
    assert re.search(r"^Rank 2 requested '.*' \d+\.\d s ago, its operation number \d+, and nothing since\.$", first,
                     re.MULTILINE)
    assert "the other ranks wait for rank 2 with [allreduce.awaited]. It has made 3 optimizer steps" in last
    assert "in wait_for_the_last_rank\n    dawdle()\n" in last and "in dawdle\n" in last
    # On a busy machine the first steps may have waited for it, but not the last operation.
    assert "awaited" not in middle


def let_rank_0_be_late():
    hvd.init()
    if hvd.rank() == 0:
        dawdle()
    hvd.barrier()


def test_rank_0_is_late_itself(run_ranks):
    first, other = [result.output for result in run_ranks(2, let_rank_0_be_late, env=WARNING)]
    assert re.search(r"^0: \[barrier", first, re.MULTILINE) and "Rank 0 " in first
    assert "the other ranks wait for rank 0" in first and "in dawdle\n" in first
    assert "wait for" not in other


def stay_away(folder):
    hvd.init()
    others = [Path(folder, str(rank)) for rank in (0, 2)]
    while hvd.rank() == 1 and not all(path.exists() for path in others):
        time.sleep(0.05)
    with pytest.raises(hvd.HorovodInternalError, match=r"ranks \(1\) are stalled for longer than 2 seconds"):
        hvd.allreduce(torch.ones(1), name="never")
    Path(folder, str(hvd.rank())).touch()


def test_the_shutdown_time(run_ranks, tmp_path):
    env = {**WARNING, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    results = run_ranks(3, stay_away, arguments={"folder": str(tmp_path)}, env=env)
    assert "1!: [allreduce.never]" in results[0].output
    assert 'One or more rank (marked by "!") is stalled for longer than 2 seconds. Will shutdown.' in results[0].output
    assert results[1].output.count("the other ranks wait for rank 1 with [allreduce.never]") == 1


def stay_together():
    hvd.init()
    time.sleep(4)
    hvd.barrier()


def test_nobody_is_late(run_ranks):
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "3", "HOROVOD_STALL_CHECK_DISABLE": "0"}
    assert not any("wait" in result.output for result in run_ranks(2, stay_together, env=env))


def receive_from_anybody(file):
    """Rank 0 stays ready for a message of rank 2, which sends none for longer than the shutdown time."""
    hvd.init()
    dist.init_process_group("bagua", init_method=f"file://{file}", rank=hvd.rank(), world_size=hvd.size())
    message = torch.empty(1)
    for sender, steps in ((1, 8), (2, 1)):
        if hvd.rank() == sender:
            dist.send(torch.ones(1), 0)
        elif hvd.rank() == 0:
            assert dist.recv(message) == sender
        for _ in range(steps):
            time.sleep(0.5)
            hvd.barrier()


def test_nobody_waits_for_a_receive_from_any_source(run_ranks, tmp_path):
    env = {**WARNING, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    results = run_ranks(3, receive_from_anybody, env=env, arguments={"file": str(tmp_path / "store")})
    assert not any("Missing ranks" in result.output for result in results)


def come_late():
    hvd.init()
    if hvd.rank() == 0:
        time.sleep(3)
    hvd.barrier()


def test_the_check_can_be_disabled(run_ranks):
    env = {**WARNING, "HOROVOD_STALL_CHECK_DISABLE": "1"}
    assert not any("wait" in result.output for result in run_ranks(2, come_late, env=env))
