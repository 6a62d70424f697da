"""The communication of tensor parallelism in every layer: all_reduce of bfloat16, alternating bagua_hvd and gloo.

    torchrun --standalone --nproc-per-node 2 -m tests.laboratory.tensor_parallel
    torchrun --standalone --nproc-per-node 2 -m tests.laboratory.tensor_parallel --record

A time is the median of a turn's calls on rank 0; a barrier precedes each turn.
"""
import argparse
import statistics
import time

from bagua_hvd.bench import report
from tests.laboratory import records

BACKENDS = "bagua", "gloo"
SIZES = {"32 KiB": 32 << 10, "128 KiB": 128 << 10, "512 KiB": 512 << 10}


def measure(turns, calls):
    """{"backend size": seconds of each turn} on this rank."""
    import torch
    import torch.distributed as dist

    import bagua_hvd.torch.distributed  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    seconds: dict[str, list[float]] = {}
    for turn in range(turns + 1):
        for size, nbytes in SIZES.items():
            tensor = torch.zeros(nbytes // 2, dtype=torch.bfloat16)
            for backend, group in groups.items():
                dist.barrier()
                times = []
                for _ in range(calls):
                    began = time.perf_counter()
                    dist.all_reduce(tensor, group=group)
                    times.append(time.perf_counter() - began)
                if turn:                # the first one warms up
                    seconds.setdefault(f"{backend} {size}", []).append(statistics.median(times))
    ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return ranks, is_first, seconds


def lines(seconds):
    """A line of a table for each size, of {"backend size": seconds}."""
    found = []
    for size in SIZES:
        ours, gloos = (statistics.median(seconds[f"{backend} {size}"]) for backend in BACKENDS)
        found.append((size, f"{1e6 * ours:.0f}", f"{1e6 * gloos:.0f}", f"{gloos / ours:.0f}x"))
    return report.table(("bfloat16", "bagua, us", "gloo, us", "faster"), found, left=1)


def table(folder=records.FOLDER):
    """The table of the newest record."""
    found = records.read("tensor_parallel", folder)
    if not found:
        return "Nothing run yet."
    last = found[-1]
    return (lines({name: samples.values for name, samples in last.samples.items()}) +
            f"\n\n{last.setting['ranks']} ranks, {last.machine['cores']} cores of {last.machine['cpu']}, "
            f"revision {last.revision}, {last.date.split()[0]}.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--record", action="store_true", help="append to docs/results/records/tensor_parallel.jsonl")
    arguments = parser.parse_args()
    ranks, is_first, seconds = measure(arguments.turns, arguments.calls)
    if is_first:
        print(lines(seconds))
        if arguments.record:
            records.append("tensor_parallel", {"ranks": ranks}, {name: ("s", times) for name, times in seconds.items()},
                           command=f"torchrun --standalone --nproc-per-node {ranks} -m {__spec__.name} --record")


if __name__ == "__main__":
    main()
