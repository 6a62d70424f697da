"""Steps per second of DistributedDataParallel over bagua_hvd and over gloo, in turns in the same processes.

    python -m bagua_hvd.bench.ddp                               2 ranks on this host
    python -m bagua_hvd.bench.ddp --hosts 2 --rate 1gbit        each on a host of its own (as root)

Every way has a model of its own, of equal weights, over groups of the same ranks; turns of --steps steps go round, so
that what else the machine does meets all of them. The model is an MLP 784-2048-2048-10: 23 MB of gradients.
"""
import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack

from bagua_hvd.bench.hosts import Hosts, why_impossible

WAYS = {
    "gloo": ("gloo", None), "bagua": ("bagua", None), "gloo, bytegrad hook": ("gloo", "bytegrad"),
    "bagua, bytegrad hook": ("bagua", "bytegrad"),
}


def rank_main(steps, rounds, names):
    """One rank: prints a line for each way, rank 0 does."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import bagua_hvd.torch.distributed  # noqa: F401  (registers the backend)
    from bagua_hvd.torch import ddp

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {backend: dist.new_group(backend=backend) for backend in ("gloo", "bagua")}
    ways = {}
    for name in names:
        backend, hook = WAYS[name]
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
        model = DistributedDataParallel(net, process_group=groups[backend])
        if hook:
            model.register_comm_hook(ddp.State(groups[backend]), ddp.hook(hook))
        ways[name] = model, torch.optim.SGD(model.parameters(), 1e-3)
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(32, 784), torch.randint(0, 10, (32,))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round in range(rounds + 1):
        for name, (model, optimizer) in ways.items():
            dist.barrier()
            for _ in range(steps):
                began = time.perf_counter()
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if round:               # the first one warms up
                    seconds[name].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        first = None
        for name in names:
            median = statistics.median(seconds[name])
            first = first or median
            print(f"{name:24} {1 / median:7.1f} steps/s   {1000 * median:8.2f} ms a step   {first / median:5.2f} x",
                  flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it")
    parser.add_argument("--steps", type=int, default=10, help="in a turn")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--ways", default=",".join(WAYS).replace(", ", " "), help=f"of: {'; '.join(WAYS)}")
    arguments = parser.parse_args()
    names = [name for name in WAYS if name.replace(", ", " ") in arguments.ways.split(",")]
    if "RANK" in os.environ:
        rank_main(arguments.steps, arguments.rounds, names)
        return
    if arguments.hosts > 1 and why_impossible():
        sys.exit(why_impossible())
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(arguments.hosts, arguments.rate)) if arguments.hosts > 1 else None
        port = 20000 + os.getpid() % 10000
        processes = []
        for rank in range(arguments.ranks):
            host = rank * arguments.hosts // arguments.ranks
            inside = ["ip", "netns", "exec", hosts.names[host]] if hosts else []
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(arguments.ranks), "MASTER_PORT": str(port),
                "MASTER_ADDR": hosts.address_of(0) if hosts else "127.0.0.1", "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0" if hosts else "lo"}
            processes.append(subprocess.Popen([*inside, sys.executable, "-m", "bagua_hvd.bench.ddp", *sys.argv[1:]],
                                              env=environment))
        codes = [process.wait() for process in processes]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
