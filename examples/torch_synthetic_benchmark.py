"""Images per second on synthetic data, as Horovod's users know it.

    baguarun -np 2 python examples/torch_synthetic_benchmark.py --model mlp --algorithm bytegrad

`--model resnet` computes much and sends little (0.3 million parameters), `--model mlp` the reverse (4.2 million).
"""
import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

import bagua_hvd.torch as hvd

IMAGE = (3, 32, 32)
CLASSES = 10


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.around = nn.Identity()
        if inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.around(x))


def resnet():
    """The 20 layers that He et al. (arXiv:1512.03385) train on 32 x 32 pixels."""
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for outputs in (16, 32, 64):
        for stride in (2 if outputs != width else 1, 1, 1):
            layers.append(Block(width, outputs, stride))
            width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def mlp():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 32 * 32, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, CLASSES),
    )


MODELS = {"resnet": resnet, "mlp": mlp}


def log(text):
    if hvd.rank() == 0:
        print(text, flush=True)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="batches that are not measured")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="batches in one measurement")
    parser.add_argument("--num-iters", type=int, default=10, help="measurements")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    parser.add_argument("--algorithm", help="None: BAGUA_ALGORITHM, else gradient_allreduce")
    return parser.parse_args()


def main():
    args = parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(42)

    model = MODELS[args.model]()
    # Adasum needs no larger rate for more ranks.
    lr = 0.01 if args.use_adasum else 0.01 * hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        algorithm=args.algorithm,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    images = torch.randn(args.batch_size, *IMAGE)
    labels = torch.randint(CLASSES, (args.batch_size,))

    def run_batches(count):
        """Runs `count` steps; returns their seconds."""
        started = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        return time.perf_counter() - started

    log(f"Model: {args.model}")
    log(f"Batch size: {args.batch_size}")
    log(f"Number of CPUs: {hvd.size()}")
    log("Running warmup...")
    run_batches(args.num_warmup_batches)

    log("Running benchmark...")
    rates = []
    for i in range(args.num_iters):
        rate = args.batch_size * args.num_batches_per_iter / run_batches(args.num_batches_per_iter)
        log(f"Iter #{i}: {rate:.1f} img/sec per CPU")
        rates.append(rate)

    mean, spread = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
    log(f"Img/sec per CPU: {mean:.1f} +-{spread:.1f}")
    log(f"Total img/sec on {hvd.size()} CPU(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
