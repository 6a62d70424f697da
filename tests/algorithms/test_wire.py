"""Bytes that a rank sends per step against the formulas of docs/algorithms.md."""
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms
from bagua_hvd.algorithms import Auto, Decentralized, OneBitAdam, PowerSGD, QAdam
from bagua_hvd.job import basics
from diloco import whole_diloco

ROWS, COLUMNS = 600, 500
N = ROWS * COLUMNS
STEPS, R = 4, 2
NOW = {"sync_interval_ms": 0, "max_staleness": 1}

# algorithm -> bytes per rank and step, of n ranks
SENT = {
    "auto": lambda n: 8 * N * (n - 1) / n,
    "gradient_allreduce": lambda n: 8 * N * (n - 1) / n,
    "bytegrad": lambda n: 2 * N * (n - 1) / n,
    "rotated": lambda n: N / 2 * (n - 1) / n * (1 + 1 / 32),
    "doublesqueeze": lambda n: N / 4 * (n - 1) / n,
    "topk": lambda n: 8 * 0.03 * N * (n - 1),
    "powersgd": lambda n: 8 * (n - 1) / n * R * (ROWS + COLUMNS),
    "qadam": lambda n: 2 * N * (n - 1) / n,
    "onebit_adam": lambda n: N / 4 * (n - 1) / n,
    "decentralized": lambda n: 8 * N * (n - 1) / n,
    "shift_one": lambda n: 4 * N * (1 if n % 2 == 0 else (n - 1) / n),
    "low_precision_decentralized": lambda n: N * min(n - 1, 2),
    "choco": lambda n: N / 8 * min(n - 1, 2),
    "local_sgd": lambda n: 8 * N * (n - 1) / n / 2,
    "whole_diloco": lambda n: 8 * N * (n - 1) / n / 4,
    "diloco": lambda n: N * (n - 1) / n / 4 * (1 + 1 / 32),
    "async": lambda n: 8 * N * (n - 1) / n,
}
ARGUMENTS = {
    "diloco": {"communication_interval": 4, "fragments": 1}, "low_precision_decentralized": {"hierarchical": False},
    "async": NOW,
}
INSTANCES = {
    "auto": lambda: Auto(plan={"algorithm": "gradient_allreduce"}),
    "powersgd": lambda: PowerSGD(R, warmup_steps=0),
    "whole_diloco": lambda: whole_diloco(4),
    "shift_one": lambda: Decentralized(False, "shift_one"),
    "qadam": lambda: QAdam(False, warmup_steps=1), "onebit_adam": lambda: OneBitAdam(warmup_steps=1),
}


def measure():
    hvd.init()
    n, missed = hvd.size(), []
    assert SENT.keys() == {*algorithms.names(), "shift_one", "whole_diloco"}
    for name, formula in SENT.items():
        parameter = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
        algorithm = INSTANCES[name]() if name in INSTANCES else algorithms.get(name, **ARGUMENTS.get(name, {}))
        optimizer_class = torch.optim.Adam if algorithm.uses_adam else torch.optim.SGD
        optimizer = hvd.DistributedOptimizer(optimizer_class([parameter], lr=0.1), algorithm=algorithm)
        gradient = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(hvd.rank()))

        def steps(count, optimizer=optimizer, parameter=parameter, gradient=gradient):
            for _ in range(count):
                optimizer.zero_grad()
                (parameter * gradient).sum().backward()
                optimizer.step()
            hvd.barrier()
            return basics.context().counters().payload_bytes_sent

        # Sent once, before: the replicas, DiLoCo's start. A period is n for odd n, in which every rank pauses once.
        before = steps(STEPS)
        count = STEPS * (n if "shift_one" in name else 1)
        sent = (steps(count) - before) / count
        everyone = hvd.allgather(torch.tensor([sent]))
        if not abs(everyone - formula(n)).max() <= 0.02 * formula(n):
            missed.append((name, everyone.tolist(), formula(n)))
        if algorithm.asynchronous:
            algorithm.abort()
    assert not missed, missed


@pytest.mark.parametrize("n", [2, 3, 4])
def test_bytes_are_the_formulas(run_ranks, n):
    run_ranks(n, measure, env={"BAGUA_HVD_TRANSPORT": "tcp", "BAGUA_HVD_ALLREDUCE": "ring"}, timeout=110)
