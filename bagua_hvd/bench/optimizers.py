"""Times an optimizer's step, by torch's implementations and over flat views: `python -m bagua_hvd.bench.optimizers`.

    loop       foreach=False: tensor by tensor
    foreach    foreach=True: lists of tensors
    fused      fused=True: one kernel for all of a step's arithmetic
    flat, *    parameters, gradients and state in one buffer each, the optimizer over one parameter, as in Bagua

In turns: each round takes one step of each; medians of all rounds. One thread's time is its own CPU time, whatever else
runs. All variants end with the same weights, to rounding.
"""
import argparse
import statistics
import time

import torch

VARIANTS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS = {
    "sgd, momentum": lambda parameters, **options: torch.optim.SGD(parameters, 1e-3, momentum=0.9, **options),
    "adam": lambda parameters, **options: torch.optim.Adam(parameters, 1e-3, **options),
    "adamw": lambda parameters, **options: torch.optim.AdamW(parameters, 1e-3, **options),
}


def _transformer(width, layers):
    """The shapes of a stack of transformer layers: matrices, and vectors of biases and norms."""
    layer = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,),
             (width, 4 * width), (width,), (width,), (width,), (width,), (width,)]
    return layer * layers


MODELS = {"100 small layers": [(64, 64), (64,)] * 100, "transformer, 2 x 96": _transformer(96, 2),
          "transformer, 12 x 256": _transformer(256, 12), "transformer, 4 x 768": _transformer(768, 4)}


def parameters(shapes, flat):
    """With gradients, the same for all variants. flat: one parameter that holds all."""
    generator = torch.Generator().manual_seed(0)
    made = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2)]
    if flat:
        made = [[torch.cat([tensor.flatten() for tensor in tensors])] for tensors in made]
    result = [torch.nn.Parameter(tensor) for tensor in made[0]]
    for parameter, gradient in zip(result, made[1], strict=True):
        parameter.grad = gradient
    return result


def measure(shapes, optimizer: str, rounds: int, device: str) -> dict[str, float]:
    """Median milliseconds of a step: {variant: ms}. RuntimeError: variants do not agree."""
    made, own = {}, {}
    for flat in (False, True):
        for name, options in VARIANTS.items():
            if flat and name == "foreach":
                continue        # of one tensor: the loop
            variant = f"flat, {name}" if flat else name
            own[variant] = parameters(shapes, flat)
            for parameter in own[variant]:
                gradient, parameter.data = parameter.grad, parameter.data.to(device)
                parameter.grad = gradient.to(device)
            made[variant] = OPTIMIZERS[optimizer](own[variant], **options)
    times: dict[str, list[float]] = {variant: [] for variant in made}
    clock = time.thread_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(rounds + 2):
        for variant, one in made.items():
            started = clock()
            one.step()
            if device == "cuda":
                torch.cuda.synchronize()
            times[variant].append(1e3 * (clock() - started))
    ends = [torch.cat([parameter.detach().flatten() for parameter in each]) for each in own.values()]
    if not all(torch.allclose(end, ends[0], atol=1e-5) for end in ends):
        raise RuntimeError(f"{optimizer}: the variants' weights differ")
    return {variant: statistics.median(each[2:]) for variant, each in times.items()}      # state is made in the first


def main():
    parser = argparse.ArgumentParser(prog="python -m bagua_hvd.bench.optimizers", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="default 100")
    parser.add_argument("--threads", type=int, default=1, help="default 1")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.device}, threads: {args.threads}; ms a step")
    print(f"{'optimizer':15}{'model':23}{'tensors':>8}{'MB':>7}", end="")
    for number, (model, shapes) in enumerate(MODELS.items()):
        for optimizer in OPTIMIZERS:
            found = measure(shapes, optimizer, args.rounds, args.device)
            if not number and optimizer == next(iter(OPTIMIZERS)):
                print("".join(f"{variant:>12}" for variant in found))
            nbytes = 4 * sum(torch.Size(shape).numel() for shape in shapes)
            print(f"{optimizer:15}{model:23}{len(shapes):8}{nbytes / 1e6:7.1f}"
                  + "".join(f"{ms:12.3f}" for ms in found.values()), flush=True)


if __name__ == "__main__":
    main()
