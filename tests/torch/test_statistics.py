"""hvd.statistics() returns figures that can be computed by hand; so does the endpoint for Prometheus."""
import json
import time
import urllib.request

import pytest
import torch
from torch import nn

import bagua_hvd.torch as hvd
from bagua_hvd.core.operations import counted
from bagua_hvd.job import runtime, statistics
from ports import free_port
from two_phases import TwoPhases

PARAMETERS, STEPS = 1000, 5


def train(algorithm):
    parameter = nn.Parameter(torch.ones(PARAMETERS))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 0.1), [("p", parameter)], algorithm=algorithm)
    for _ in range(STEPS):
        optimizer.zero_grad()
        parameter.square().sum().backward()
        optimizer.step()


def counts():
    hvd.init()
    assert hvd.statistics().total.algorithms == {}
    train("gradient_allreduce")
    first = hvd.statistics()
    train("bytegrad")
    second = hvd.statistics()
    exact, coded = first.recent, second.recent
    assert exact.algorithms.keys() == {"GradientAllReduce"} and exact.steps == STEPS
    assert exact.algorithms["GradientAllReduce"].gradient_bytes == 4 * PARAMETERS * STEPS
    assert (coded.algorithms["ByteGrad"].steps, coded.algorithms["GradientAllReduce"].steps) == (STEPS, 0)
    # Each of two ranks sends half of its gradients and half of the sum; as bytes, a quarter of that plus a few bounds.
    assert 4 * PARAMETERS * STEPS <= exact.bytes_sent < 4 * PARAMETERS * STEPS + 1000
    assert PARAMETERS * STEPS <= coded.bytes_sent < PARAMETERS * STEPS + 2000
    assert coded.algorithms["ByteGrad"].bytes_sent == coded.bytes_sent
    assert coded.algorithms["GradientAllReduce"].bytes_sent == 0
    assert 0 < exact.exposed_ms < 60_000 and 0 < exact.blocked_ms and exact.operations >= STEPS
    assert second.total.steps == 2 * STEPS and second.total.seconds >= second.recent.seconds > 0
    assert second.total.bytes_sent == first.total.bytes_sent + coded.bytes_sent
    flat = second.total.as_dict()
    assert flat["bagua_hvd/algorithms/ByteGrad/steps"] == STEPS
    assert flat["bagua_hvd/bytes_sent"] == second.total.bytes_sent and flat["bagua_hvd/steps"] == 2 * STEPS
    assert all(isinstance(value, (int, float)) and isinstance(name, str) for name, value in flat.items())
    hvd.shutdown()
    hvd.init()
    assert hvd.statistics().total.steps == 0


def test_counts(run_ranks):
    run_ranks(2, counts)


def by_algorithm(kind):
    hvd.init()
    hvd.statistics()
    for algorithm in ("gradient_allreduce", "bytegrad", "decentralized", "powersgd", "async",
                      hvd.algorithms.GradientAllReduce()):
        train(algorithm)
    late = nn.Parameter(torch.ones(20, 30))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([late], 0.1), [("late", late)], delay=1,
                                         algorithm=TwoPhases())
    for _ in range(STEPS):
        optimizer.zero_grad()
        late.square().sum().backward()
        optimizer.step()
    optimizer.state_dict()                          # the late average arrives
    trained = hvd.statistics().recent
    assert len(trained.algorithms) == 6
    for name, record in trained.algorithms.items():
        assert record.bytes_sent == getattr(record, f"{kind}_bytes_sent") > 0, (name, record)
    sent = {name: record.bytes_sent for name, record in trained.algorithms.items()}
    assert PARAMETERS * STEPS <= sent["ByteGrad"] < PARAMETERS * STEPS + 2000
    assert 8 * PARAMETERS * STEPS <= sent["GradientAllReduce"] < 8 * PARAMETERS * STEPS + 1000
    assert trained.bytes_sent == sum(sent.values())
    # In fusion with other operations, each counts its share.
    handles = [hvd.allreduce_async(torch.ones(n, dtype=torch.float64), name=f"user.{n}") for n in (1000, 3000)]
    train("gradient_allreduce")
    for handle in handles:
        hvd.synchronize(handle)
    both = hvd.statistics().recent
    assert 4 * PARAMETERS * STEPS <= both.algorithms["GradientAllReduce"].bytes_sent < 4 * PARAMETERS * STEPS + 1000
    assert both.bytes_sent - both.algorithms["GradientAllReduce"].bytes_sent >= 32_000
    # Algorithms beyond the limit of counters count in the total only.
    for number in range(70):
        account = statistics.Account(f"Algorithm{number}")
        account.renew()
        counted(account.byte_counter, hvd.allreduce, torch.ones(1000), None, "counted")
    many = hvd.statistics().recent
    assert many.algorithms["Algorithm0"].bytes_sent == many.algorithms["Algorithm50"].bytes_sent >= 4000
    assert many.algorithms["Algorithm69"].bytes_sent == 0 and many.bytes_sent >= 70 * 4000
    assert len(json.dumps(statistics.figures())) < 2000         # one line of a report
    hvd.barrier()


@pytest.mark.parametrize(("kind", "env"), [("shm", {}), ("tcp", {"BAGUA_HVD_TRANSPORT": "tcp"})])
def test_bytes_by_algorithm(run_ranks, kind, env):
    run_ranks(2, by_algorithm, arguments={"kind": kind}, env=env)


def test_before_init():
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.statistics()


def link_kinds(kind):
    hvd.init()
    hvd.statistics()
    hvd.allreduce(torch.ones(1000, dtype=torch.float64))
    recent = hvd.statistics().recent
    by_kind = {name: getattr(recent, f"{name}_bytes_sent") for name in ("shm", "tcp", "mpi")}
    assert by_kind.pop(kind) == recent.bytes_sent >= 8000 and not any(by_kind.values()) and recent.nccl_bytes == 0
    hvd.barrier()


@pytest.mark.parametrize(("kind", "env"), [("shm", {}), ("tcp", {"BAGUA_HVD_TRANSPORT": "tcp"})])
def test_bytes_by_link_kind(run_ranks, kind, env):
    run_ranks(2, link_kinds, arguments={"kind": kind}, env=env)


LATE, LATE_SECONDS = 3, 0.2


def who_is_waited_for():
    hvd.init()
    hvd.barrier()
    hvd.statistics()
    for _ in range(LATE):
        if hvd.rank() == 2:
            time.sleep(LATE_SECONDS)
        hvd.allreduce(torch.ones(1), name="late")
    waited = hvd.statistics().recent.waited_for
    if hvd.rank() == 0:
        # Other ranks may be last by chance, which costs little compared with three sleeps.
        assert waited[2].operations >= 1
        assert max(waited, key=lambda rank: waited[rank].waited_ms) == 2 and waited[2].waited_ms > 0
        assert sum(record.operations for record in waited.values()) == LATE
        assert hvd.statistics().recent.waited_for[2].operations == 0
    else:
        assert waited == {}
    hvd.barrier()


def test_waiting_for_whom(run_ranks):
    run_ranks(3, who_is_waited_for)


def metrics():
    hvd.init()
    train("bytegrad")
    if hvd.rank() == 0:
        port = runtime.runtime.metrics_server[0].server_port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert f'bagua_hvd_algorithm_steps_total{{algorithm="ByteGrad"}} {STEPS}.0' in text, text
        assert "bagua_hvd_bytes_sent_total " in text and f"bagua_hvd_steps_total {STEPS}.0" in text
        assert 'bagua_hvd_algorithm_tcp_bytes_sent_total{algorithm="ByteGrad"} 0' in text
        assert 'bagua_hvd_waited_for_operations_total{rank="' in text
    else:
        assert runtime.runtime.metrics_server is None
    hvd.barrier()


def test_prometheus(run_ranks):
    pytest.importorskip("prometheus_client")
    run_ranks(2, metrics, env={"BAGUA_HVD_METRICS_PORT": str(free_port())})
