"""Under torchrun: a rank is lost, torchrun starts all of them again, and no step that any survivor completed is lost.

    torchrun --nproc-per-node 3 --max-restarts 10 examples/torch_torchrun.py

A worker that notices the loss has changed no weight in the failed step. It writes its state to a file on this host; the
new workers begin with the newest state. Without failures nothing is written.
"""
import argparse
import os
import signal
from pathlib import Path

import torch

import bagua_hvd.torch as hvd


def batch_of(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(32, 10, generator=generator)
    return inputs, inputs.prod(1, keepdim=True).tanh()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="on each host")
    args = parser.parse_args()
    # torchrun's SIGTERM would end this worker while it writes; the loss of a rank ends it anyway.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())

    file = args.folder / f"{os.environ['TORCHELASTIC_RUN_ID']}.{os.environ['LOCAL_RANK']}"
    step = 0
    if file.exists():
        kept = torch.load(file)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step = kept["step"]
    steps = hvd.allgather_object(step)
    step, newest = max(steps), steps.index(max(steps))
    hvd.broadcast_parameters(model.state_dict(), newest)
    hvd.broadcast_optimizer_state(optimizer, newest)
    print(f"process {os.getpid()}, rank {hvd.rank()}: begins with step {step}", flush=True)
    try:
        while step < args.steps:
            inputs, targets = batch_of(step, hvd.rank())
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            step += 1
            if step % 100 == 0 and hvd.rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
        loss = hvd.allreduce(loss.detach())
    except hvd.HorovodInternalError:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)
        raise
    file.unlink(missing_ok=True)
    if hvd.rank() == 0:
        print(f"mean loss {loss.item():.9f}", flush=True)


if __name__ == "__main__":
    main()
