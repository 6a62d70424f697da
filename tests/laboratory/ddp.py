"""Steps per second of DistributedDataParallel over bagua_hvd and over gloo, alternating in the same processes.

    python -m tests.laboratory.ddp                               2 ranks on this host
    python -m tests.laboratory.ddp --hosts 2 --rate 1gbit        each on a host of its own (as root)
    python -m tests.laboratory.ddp --record                      and a line for docs/results/records/ddp.jsonl

Each configuration has its own model with equal weights, over groups of the same ranks. They take turns of --steps
steps, so that other load on the machine affects all equally. The model is an MLP 784-2048-2048-10: 23 MB of gradients.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bagua_hvd.bench import report
from tests.laboratory import records
from tests.laboratory.hosts import Hosts, why_impossible

WAYS = {
    "gloo": ("gloo", None), "bagua": ("bagua", None), "gloo, bytegrad hook": ("gloo", "bytegrad"),
    "bagua, bytegrad hook": ("bagua", "bytegrad"),
}


def hooked(model, way):
    """A model in DistributedDataParallel, over the default group. way: "ddp"; PyTorch's "ddp_fp16", "ddp_powersgd"."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    # One bucket: PowerSGD's hook continues in callbacks, and gloo confuses operations of two buckets in another order.
    size = {"bucket_cap_mb": 1 << 20} if way == "ddp_powersgd" else {}
    wrapped = DistributedDataParallel(model, **size)
    if way == "ddp_fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif way == "ddp_powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def rank_main(steps, rounds, names, rows):
    """One rank. Rank 0 writes the seconds of every step, by configuration, to the file `rows`."""
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
        Path(rows).write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def table(hosts, folder=records.FOLDER):
    """Over all runs with this number of hosts: each configuration's median step, and its speedup over gloo."""
    runs = [run for run in records.read("ddp", folder, hosts=int(hosts)) if run.samples.keys() >= WAYS.keys()]
    if not runs:
        return "Nothing run yet."
    lines = []
    for name in WAYS:
        medians = [[statistics.median(run.samples[way].values) for way in (name, "gloo")] for run in runs]
        own, times = sorted(own for own, _ in medians), sorted(gloo / own for own, gloo in medians)
        lines.append((f"DDP over {name}", f"{1e3 * own[0]:.1f} to {1e3 * own[-1]:.1f}",
                      f"{times[0]:.2f} to {times[-1]:.2f}"))
    last = runs[-1]
    columns = (f"{len(runs)} runs", "ms a step", "times gloo's steps per second")
    return (f"{report.table(columns, lines, left=1)}\n\n{last.machine['cores']} cores of {last.machine['cpu']}, "
            f"revision {last.revision}, {last.date.split()[0]}: `{last.command}`")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it")
    parser.add_argument("--steps", type=int, default=10, help="in a turn")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--ways", default=",".join(WAYS).replace(", ", " "), help=f"of: {'; '.join(WAYS)}")
    parser.add_argument("--record", action="store_true", help="append to docs/results/records/ddp.jsonl")
    parser.add_argument("--rows", help=argparse.SUPPRESS)       # set if this process is a rank
    arguments = parser.parse_args()
    names = [name for name in WAYS if name.replace(", ", " ") in arguments.ways.split(",")]
    if arguments.rows:
        rank_main(arguments.steps, arguments.rounds, names, arguments.rows)
        return
    if arguments.hosts > 1 and why_impossible():
        sys.exit(why_impossible())
    with ExitStack() as stack:
        rows = Path(stack.enter_context(tempfile.TemporaryDirectory()), "rows.json")
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
            processes.append(subprocess.Popen([*inside, sys.executable, "-m", "tests.laboratory.ddp", *sys.argv[1:],
                                               "--rows", str(rows)], env=environment))
        if any([process.wait() for process in processes]):
            sys.exit("a rank has failed: see above")
        measured = json.loads(rows.read_text())
    medians = {name: statistics.median(seconds) for name, seconds in measured.items()}
    first = medians[names[0]]
    print(report.table(("", "steps/s", "ms a step", f"times those of {names[0]}"), [
        (name, f"{1 / median:.1f}", f"{1e3 * median:.2f}", f"{first / median:.2f}")
        for name, median in medians.items()], left=1))
    if arguments.record:
        setting = {"hosts": arguments.hosts, "ranks": arguments.ranks, "rate": arguments.rate if hosts else None}
        records.append("ddp", setting, {name: ("s", seconds) for name, seconds in measured.items()})


if __name__ == "__main__":
    main()
