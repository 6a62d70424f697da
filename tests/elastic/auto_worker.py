"""A worker with the algorithm Auto, and fake timings by which codecs halve the step time, so that it switches to them.

Prints a line `event key=value ...` for each event. Trains until rank 0 finds the file TEST_STOP.
"""
import os
import time

import torch
from torch import nn

import bagua_hvd.torch as hvd
from bagua_hvd.tuning import tuner
from bagua_hvd.tuning.predict import Window

PLAN = "float16"


def say(event, **words):
    print(event, *(f"{key}={value}" for key, value in words.items()), flush=True)


def us(plan):
    """The step time in microseconds, both predicted and measured."""
    return {"gradient_allreduce": 10_000, PLAN: 5_000}.get(str(plan), 20_000)


def measured(*_):
    return Window(us(optimizer.algorithm._tuner(optimizer.reducer.model).plan), 4_000, 2_000, (2_000,), (1.0,))


tuner.Tuner.predict = lambda self, *_: list(map(us, self._plans))
tuner.window = measured
torch.set_num_threads(1)
hvd.init()
torch.manual_seed(hvd.rank())
model = nn.Linear(40, 30)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters(),
                                     algorithm=hvd.algorithms.Auto(up_to="E1", window=2))
state = hvd.elastic.TorchState(model, optimizer, steps=0)


@hvd.elastic.run
def train(state):
    say("enter", step=state.steps, rank=hvd.rank(), size=hvd.size(), pid=os.getpid())
    said = False
    stop = False
    while not stop:
        optimizer.zero_grad()
        model(torch.randn(4, 40)).square().mean().backward()
        optimizer.step()
        state.steps += 1
        state.commit()
        deciding = optimizer.algorithm._tuner(optimizer.reducer.model)
        if deciding._hysteresis.plan and str(deciding.plan) != PLAN and not said:
            said = True
            say("decided", step=state.steps, rank=hvd.rank(), pid=os.getpid())
            time.sleep(2)           # the test kills this rank, or its peer
        plans = hvd.allgather_object(str(deciding.plan), name="plan")
        assert plans == plans[:1] * hvd.size(), plans
        say("committed", step=state.steps, rank=hvd.rank(), size=hvd.size(), plan=plans[0])
        stop = hvd.broadcast_object(os.path.exists(os.environ["TEST_STOP"]), name="stop")
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    say("done", step=state.steps, rank=hvd.rank(), size=hvd.size(), plan=deciding.plan,
        equal=torch.equal(weights, hvd.broadcast(weights, 0)))


train(state)
