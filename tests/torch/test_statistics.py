"""hvd.statistics(): figures that a calculation on paper gives as well; and what Prometheus scrapes."""
import urllib.request

import pytest
import torch
from torch import nn

import bagua_hvd.torch as hvd
from bagua_hvd.job import runtime
from ports import free_port

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
    # Of two ranks, each sends half of its own and half of the sum; as bytes, a quarter of that and a few bounds.
    assert 4 * PARAMETERS * STEPS <= exact.bytes_sent < 4 * PARAMETERS * STEPS + 1000
    assert PARAMETERS * STEPS <= coded.bytes_sent < PARAMETERS * STEPS + 2000
    assert 0 < exact.exposed_ms < 60_000 and 0 < exact.blocked_ms and exact.operations >= STEPS
    assert second.total.steps == 2 * STEPS and second.total.seconds >= second.recent.seconds > 0
    assert second.total.bytes_sent == first.total.bytes_sent + coded.bytes_sent
    flat = second.total.flat()
    assert flat["bagua_hvd/ByteGrad/steps"] == STEPS and flat["bagua_hvd/bytes_sent"] == second.total.bytes_sent
    hvd.shutdown()
    hvd.init()
    assert hvd.statistics().total.steps == 0


def test_counts(run_ranks):
    run_ranks(2, counts)


def test_before_init():
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.statistics()


def metrics():
    hvd.init()
    train("bytegrad")
    if hvd.rank() == 0:
        port = runtime.runtime.metrics_server[0].server_port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert f'bagua_hvd_algorithm_steps_total{{algorithm="ByteGrad"}} {STEPS}.0' in text, text
        assert "bagua_hvd_bytes_sent_total " in text
    else:
        assert runtime.runtime.metrics_server is None
    hvd.barrier()


def test_prometheus(run_ranks):
    pytest.importorskip("prometheus_client")
    run_ranks(2, metrics, env={"BAGUA_HVD_METRICS_PORT": str(free_port())})
