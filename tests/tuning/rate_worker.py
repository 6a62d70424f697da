"""A rank of test_rate.py: trains while the rate of its host's link falls. Arguments: the lower rate, and a folder."""
import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import bagua_hvd.torch as hvd
from bagua_hvd.algorithms import Auto

WIDTH, FALLS_AFTER, MOST = 512, 12, 160

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters(),
                                     algorithm=Auto(up_to="E1", window=4))
batch = torch.randn(4, WIDTH)
plans: list[str] = []
while len(plans) < MOST and (len(plans) < FALLS_AFTER or "rotated(2)" not in plans[-1]):
    if len(plans) == FALLS_AFTER:
        subprocess.run(["tc", "qdisc", "change", "dev", "eth0", "root", "tbf", "rate", sys.argv[1], "burst", "256kb",
                        "latency", "50ms"], check=True)
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    plans.append(str(optimizer.algorithm._tuner(optimizer.reducer.model).plan))
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
assert torch.equal(weights, hvd.broadcast(weights, 0))
why = hvd.statistics().plans[optimizer.reducer.model.name]["why"]
Path(sys.argv[2], f"{hvd.rank()}.json").write_text(json.dumps({"plans": plans, "why": why}))
hvd.shutdown()
