"""PyTorch's FSDP2 with codes: gradients reduce-scattered in 4 bits, weights all-gathered in 8.

    baguarun -np 2 python examples/torch_fsdp_codes.py
    baguarun -np 2 python examples/torch_fsdp_codes.py --gradients none --weights none

FSDP2 lets scripts replace both collectives: `set_custom_reduce_scatter` and `set_custom_all_gather`, tried with PyTorch
2.13. Everything else stays PyTorch's: process group, shards, optimizer. Each rank steps its own shard in full
precision; the other ranks get rounded values.

Limit: FSDP2 requires that its reduce-scatter is done when it returns, or ordered on a GPU's stream. So on CPUs the
backward pass waits for each one; there is no handle to wait for later.
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.nn import functional as F
from torch_char_lm import Transformer, characters

import bagua_hvd.torch as hvd
from bagua_hvd import codecs
from bagua_hvd.job.process_sets import global_process_set
from bagua_hvd.sharding import allgather, reducescatter

CODECS = {"none": None, "block8": codecs.block(8), "block4": codecs.block(4, stochastic=True),
          "float8": codecs.float8()}
CONTEXT, BATCH = 48, 16


class Coded:
    """Shared by both collectives: memory allocation, and a name and random seed for each call.

    FSDP2 makes the same calls in the same order on all ranks.
    """

    def __init__(self, codec, name):
        self._codec, self._name, self._calls = codec, name, 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def _called(self):
        self._calls += 1
        return f"{self._name}.{self._calls % 8}", (self._calls * hvd.size() + hvd.rank()) * hvd.size()


class CodedReduceScatter(Coded, ReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        name, seed = self._called()
        out = output_tensor.numpy().reshape(-1)
        reducescatter(input_tensor.numpy().reshape(-1), global_process_set, self._codec, name, seed).wait(out)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


class CodedAllGather(Coded, AllGather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        name, seed = self._called()
        out = output_tensor.numpy().reshape(-1)
        allgather(input_tensor.numpy().reshape(-1), global_process_set, self._codec, name, seed).wait(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gradients", choices=CODECS, default="block4")
    parser.add_argument("--weights", choices=CODECS, default="block8")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    port = hvd.broadcast_object(_free_port() if hvd.rank() == 0 else None)
    dist.init_process_group("gloo", init_method=f"tcp://{os.environ['MASTER_ADDR']}:{port}", rank=hvd.rank(),
                            world_size=hvd.size())
    train_data, held_out, vocabulary = characters()
    torch.manual_seed(0)
    model = Transformer(vocabulary, CONTEXT, width=64, layers=2)
    mesh = init_device_mesh("cpu", (hvd.size(),))
    for module in (*model.layers.layers, model):
        fully_shard(module, mesh=mesh)
        if CODECS[args.gradients]:
            module.set_custom_reduce_scatter(CodedReduceScatter(CODECS[args.gradients], f"gradients.{id_of(module)}"))
        if CODECS[args.weights]:
            module.set_custom_all_gather(CodedAllGather(CODECS[args.weights], f"weights.{id_of(module)}"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.008)
    choice, window = torch.Generator().manual_seed(hvd.rank()), torch.arange(CONTEXT + 1)
    hvd.statistics()
    for step in range(args.steps):
        batch = train_data[torch.randint(len(train_data) - CONTEXT, (BATCH, 1), generator=choice) + window]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"step {step + 1}: loss {mean:.3f}", flush=True)
    sent = hvd.statistics().recent.bytes_sent / args.steps / 1024
    with torch.no_grad():
        windows = held_out[torch.arange(0, 200 * CONTEXT, CONTEXT)[:, None] + window]
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).item()
    if hvd.rank() == 0:
        print(f"held-out loss {loss:.3f}, {sent:.0f} KiB of codes sent by each rank in a step", flush=True)
    dist.destroy_process_group()
    hvd.shutdown()


_modules = {}


def id_of(module):
    """Numbers the modules, in the same order on all ranks."""
    return _modules.setdefault(id(module), len(_modules))


def _free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
