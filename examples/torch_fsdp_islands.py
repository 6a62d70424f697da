"""DiLoCo between islands: PyTorch's FSDP2 within each, and between them something in every eighth step only.

    torchrun --nproc-per-node 4 examples/torch_fsdp_islands.py
    torchrun --nproc-per-node 4 examples/torch_fsdp_islands.py --algorithm gradient_allreduce

The ranks of an island hold one model together, each a part of every parameter. Ranks of different islands with the same
part synchronize it. bagua_hvd finds them by the mesh; everything else is an ordinary script for FSDP2.
"""
import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch_char_lm import Transformer, characters

import bagua_hvd.torch as hvd
from bagua_hvd.algorithms import DiLoCo

# full_steps=0: no gradients between islands, not even in the first steps.
ALGORITHMS = {"gradient_allreduce": "gradient_allreduce", "diloco": DiLoCo(full_steps=0)}
CONTEXT, BATCH = 48, 16


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="diloco")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")     # or "bagua"
    hvd.init()
    mesh = init_device_mesh("cpu", (args.islands, hvd.size() // args.islands), mesh_dim_names=("island", "shard"))
    train_data, held_out, vocabulary = characters()
    torch.manual_seed(0)                # all islands begin with the same model
    model = Transformer(vocabulary, CONTEXT, width=64, layers=2)
    for module in (*model.layers.layers, model):
        fully_shard(module, mesh=mesh["shard"])
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.004), model.named_parameters(),
                                         algorithm=ALGORITHMS[args.algorithm])
    choice, window = torch.Generator().manual_seed(hvd.rank()), torch.arange(CONTEXT + 1)
    for step in range(args.steps):
        if step == args.steps - 40:
            hvd.statistics()            # its `recent` counts from here
        batch = train_data[torch.randint(len(train_data) - CONTEXT, (BATCH, 1), generator=choice) + window]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"step {step + 1}: loss {mean:.3f}", flush=True)
    sent = hvd.statistics().recent.bytes_sent / 40 / 1024
    with torch.no_grad():
        windows = held_out[torch.arange(0, 200 * CONTEXT, CONTEXT)[:, None] + window]
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).item()
    if hvd.rank() == 0:
        print(f"held-out loss {loss:.3f}, {sent:.0f} KiB a step from a rank to other islands", flush=True)
    hvd.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
