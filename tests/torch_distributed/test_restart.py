"""Restarted jobs: torchrun's agent keeps one store for all restarts, and so the keys of earlier attempts."""
import os
import signal
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import bagua_hvd.torch as hvd
import bagua_hvd.torch.distributed  # noqa: F401  (registers the backend)

RANKS = 3


def only_torchs_variables():
    for name in [name for name in os.environ if name.startswith("HOROVOD_") and name != "HOROVOD_START_TIMEOUT"]:
        del os.environ[name]
    return int(os.environ["RANK"])


def attempt(number):
    """In attempt 0 rank 1 fails before it joins, in attempt 1 it is killed in the middle; rank 0 always starts last."""
    rank = only_torchs_variables()
    if number == 0 and rank == 1:
        os._exit(3)
    if rank == 0:
        time.sleep(0.3)
    for _ in range(2 + number):
        dist.init_process_group("bagua", timeout=timedelta(seconds=20 if number else 2))
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        pair = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(tensor, group=pair)
        assert tensor[0] == (2 * RANKS if rank < 2 else RANKS)
        if number == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        dist.destroy_process_group()


def attempt_of_horovod(number):
    """The same without a torch.distributed group."""
    rank = only_torchs_variables()
    if number == 0 and rank == 1:
        os._exit(3)
    if rank == 0:
        time.sleep(0.3)
    os.environ["HOROVOD_START_TIMEOUT"] = "20" if number else "2"
    for _ in range(2):
        hvd.init()
        if number == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum)[0] == RANKS
        hvd.shutdown()


def attempts(run_ranks, function, restart_count):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for number in range(4):
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(RANKS),
                     "LOCAL_WORLD_SIZE": str(RANKS), "TORCHELASTIC_USE_AGENT_STORE": "True",
                     "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": restart_count(number)}
        results = run_ranks(RANKS, function, arguments={"number": number}, timeout=60, check=number > 1,
                            rendezvous=False,
                            env=[{**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)])
        assert None not in [result.returncode for result in results], results
        if number == 0:
            assert "rank 1 left no message in torch's store within 2 s" in results[0].output


def test_groups(run_ranks):
    attempts(run_ranks, attempt, str)


def test_horovods_init(run_ranks):
    """When other hosts' ranks change, torchrun restarts without counting."""
    attempts(run_ranks, attempt_of_horovod, lambda number: "0")


def again_and_again(file):
    from torch_group import start

    rank, size = start(file)
    dist.destroy_process_group()
    kept = []
    for number in range(4):     # a file each: the last rank of a store deletes its file, even if a later attempt has it
        dist.init_process_group("bagua", init_method=f"file://{file}.{number}", rank=rank, world_size=size)
        dist.barrier()
        dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()
        dist.destroy_process_group()
        kept.append((len(os.listdir("/proc/self/fd")), sorted(thread.name for thread in threading.enumerate())))
    assert kept[1] == kept[-1], kept


def test_nothing_is_kept(run_group):
    run_group(2, again_and_again)
