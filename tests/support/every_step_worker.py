"""Trains with every_step=True, and logs its steps to a file in TEST_LOG; chaos.py kills it, and replays the logs.

    every_step_worker.py MODEL      mlp (with batch norm) or gru; until rank 0 finds the file TEST_STOP

On the host TEST_LATE_HOST it waits for the file TEST_GO before it calls init(), as if it loaded data. While TEST_LOG
has a file "slowly", each step sleeps 0.1 s, which leaves the processor to workers that start.

SIGUSR1 makes it die in its next step, at a random time of the backward pass, most of which is communication.
"""
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

from launcher import wait_until

COUNT, BATCH = 389, 4
DATA = torch.randn(COUNT, 6, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 64, batch_first=True)
        self.last = nn.Linear(64, 1)

    def forward(self, inputs):
        return self.last(self.gru(inputs)[0][:, -1])


def make_model(name):
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(24, 160), nn.BatchNorm1d(160), nn.ReLU(), nn.Linear(160, 160),
                        nn.BatchNorm1d(160), nn.ReLU(), nn.Linear(160, 1))
    return (mlp if name == "mlp" else Gru()).double()


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)


def loss_of(model, indices):
    inputs = DATA[indices]
    return (model(inputs) - inputs.flatten(1).prod(1, keepdim=True).tanh()).square().mean()


def main(name):
    import bagua_hvd.torch as hvd
    from bagua_hvd.job.runtime import runtime

    torch.set_num_threads(1)
    model = make_model(name)
    if os.environ["HOROVOD_HOSTNAME"] == os.environ.get("TEST_LATE_HOST"):
        print("loads", flush=True)
        wait_until(Path(os.environ["TEST_GO"]).exists, 300)
    hvd.init()
    file = os.open(Path(os.environ["TEST_LOG"]) / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def log(event, **words):
        os.write(file, (json.dumps({"event": event, "at": time.time(), "pid": os.getpid(), **words}) + "\n").encode())

    dies, times, slowly = [], [0.0], Path(os.environ["TEST_LOG"]) / "slowly"
    signal.signal(signal.SIGUSR1, lambda *_: dies.append(True))

    def die(seconds):
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    optimizer = hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(COUNT))
    state = hvd.elastic.TorchState(model, optimizer, every_step=True, sampler=sampler, epoch=0, batch=0, step=0)

    @hvd.elastic.run
    def train(state):
        log("enter", scope=runtime.options.scope, rank=hvd.rank(), size=hvd.size(), step=state.step,
            host=os.environ["HOROVOD_HOSTNAME"])
        print(f"enter step={state.step} rank={hvd.rank()} size={hvd.size()} pid={os.getpid()}", flush=True)
        while True:
            indices = list(sampler)
            for begin in range(0, len(indices), BATCH):
                share = indices[begin:begin + BATCH]
                if len(share) == 1 and name == "mlp":       # batch norm needs two
                    share *= 2
                if slowly.exists():
                    time.sleep(0.1)
                log("try", step=state.step, epoch=state.epoch, indices=share)
                loss = loss_of(model, share)
                began = time.monotonic()
                if dies:
                    threading.Thread(target=die, args=(random.uniform(0, max(times[-20:])),)).start()
                loss.backward()
                times.append(time.monotonic() - began)
                optimizer.step()
                log("done", step=state.step)
                state.step += 1
                state.batch += 1
                sampler.record_batch(state.batch, BATCH)
                optimizer.zero_grad()
                if state.step % 10 == 0 and hvd.broadcast_object(os.path.exists(os.environ["TEST_STOP"]), name="stop"):
                    return
            state.epoch += 1
            state.batch = 0
            sampler.set_epoch(state.epoch)

    train(state)
    torch.save(model.state_dict(), Path(os.environ["TEST_LOG"]) / f"{os.getpid()}.pt")
    print(f"done step={state.step} rank={hvd.rank()} size={hvd.size()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
