"""The second phase of an operation starts during the backward pass, when another bucket is posted."""
import time

import torch

import bagua_hvd.torch as hvd
from bagua_hvd.algorithms import PowerSGD
from bagua_hvd.core.context import Context

LAYERS, WIDTH = 3, 32


def second_phase_within_the_pass():
    hvd.init()
    torch.manual_seed(hvd.rank())
    layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=0.1),
                                         algorithm=PowerSGD(rank=1, warmup_steps=0, full_steps=0),
                                         groups=[list(layer.parameters()) for layer in layers])
    reducer, log, post, synchronize = optimizer.reducer, [], Context.post, optimizer.reducer.synchronize

    def logged_post(self, kind, name, *arguments, **keywords):
        log.append(name)
        return post(self, kind, name, *arguments, **keywords)

    def logged_synchronize():
        log.append("synchronize")
        synchronize()

    def await_first_phases(_):
        """Within the pass, before the next bucket is posted."""
        deadline = time.monotonic() + 30
        operations = reducer._window.operations.values()
        while not all(each._operation is None or each._operation.done() for each in operations):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    for step in range(3):
        if step == 2:           # the ranks compare their buckets in the first step
            Context.post, reducer.synchronize = logged_post, logged_synchronize
            for layer in layers:
                layer.weight.register_hook(await_first_phases)
        optimizer.zero_grad()
        x = torch.ones(2, WIDTH)
        for layer in layers:
            x = layer(x).tanh()
        x.sum().backward()
        optimizer.step()
    within = log[:log.index("synchronize")]
    assert sum(name.endswith(".Q") for name in within) == LAYERS - 1, log
    assert sum(name.endswith(".Q") for name in log) == LAYERS, log


def test_second_phases_are_posted_in_the_backward_pass(run_ranks):
    run_ranks(2, second_phase_within_the_pass, timeout=60)
