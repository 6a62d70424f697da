"""When the gradients of a real model are ready: measured in a real backward pass, recorded, and replayed by timers.

    python -m tests.laboratory.profiles resnet18 vgg11 lstm transformer mobilenet gru transformer256

A record "profile": setting: model, batch and shapes; samples: seconds of the forward pass, of the backward pass, of the
optimizer's step (SGD with momentum), and, by parameter, from the start of the backward pass to its gradient.
"""
import argparse
import statistics
import sys
import time

from bagua_hvd.bench.predict import Profile
from tests.laboratory import records

REPEATS = 7


def _block(nn, inward, outward, stride):
    """A basic block of ResNet."""
    class Block(nn.Module):         # type: ignore[name-defined]
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Conv2d(inward, outward, 3, stride, 1, bias=False),
                                       nn.Conv2d(outward, outward, 3, 1, 1, bias=False))
            self.norm, self.norm2, self.relu = nn.BatchNorm2d(outward), nn.BatchNorm2d(outward), nn.ReLU()
            self.shortcut = nn.Identity() if inward == outward else nn.Sequential(
                nn.Conv2d(inward, outward, 1, stride, bias=False), nn.BatchNorm2d(outward))

        def forward(self, x):
            y = self.norm2(self.second(self.relu(self.norm(self.first(x)))))
            return self.relu(y + self.shortcut(x))

    return Block()


def _resnet18(torch):
    nn = torch.nn
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2),
              (512, 512, 1)]
    return nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
                         *(_block(nn, *width) for width in widths), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(512, 1000)), torch.randn(1, 3, 224, 224)


def _vgg11(torch):
    nn = torch.nn
    layers, inward = [], 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        layers += [nn.Conv2d(inward, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
        inward = width or inward
    head = [nn.Flatten(), nn.Linear(25088, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, *head), torch.randn(1, 3, 224, 224)


def _lstm(torch):
    nn = torch.nn

    class Lstm(nn.Module):          # type: ignore[name-defined]
        def __init__(self):
            super().__init__()
            self.embedding, self.lstm = nn.Embedding(10000, 650), nn.LSTM(650, 650, 2, batch_first=True)
            self.head = nn.Linear(650, 10000)

        def forward(self, x):
            return self.head(self.lstm(self.embedding(x))[0])

    return Lstm(), torch.randint(0, 10000, (4, 35))         # "medium" of Zaremba et al., arXiv:1409.2329


def _transformer(torch):
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return nn.Sequential(nn.Embedding(10000, 512), nn.TransformerEncoder(layer, 6), nn.Linear(512, 10000)), \
        torch.randint(0, 10000, (1, 128))


def _mobilenet(torch):
    nn = torch.nn

    def layer(inward, outward, size, stride, groups=1):
        return [nn.Conv2d(inward, outward, size, stride, size // 2, groups=groups, bias=False),
                nn.BatchNorm2d(outward), nn.ReLU()]

    layers, inward = layer(3, 32, 3, 2), 32
    for outward, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2),
                            (1024, 1)):                         # arXiv:1704.04861
        layers += layer(inward, inward, 3, stride, inward) + layer(inward, outward, 1, 1)
        inward = outward
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000)), \
        torch.randn(1, 3, 128, 128)


def _gru(torch):
    nn = torch.nn

    class Gru(nn.Module):           # type: ignore[name-defined]
        def __init__(self):
            super().__init__()
            self.embedding, self.gru = nn.Embedding(2000, 256), nn.GRU(256, 512, batch_first=True)
            self.head = nn.Linear(512, 2000)

        def forward(self, x):
            return self.head(self.gru(self.embedding(x))[0])

    return Gru(), torch.randint(0, 2000, (2, 32))


def _transformer256(torch):
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return nn.Sequential(nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 1000)), \
        torch.randint(0, 1000, (1, 64))


MODELS = {"resnet18": _resnet18, "vgg11": _vgg11, "lstm": _lstm, "transformer": _transformer, "mobilenet": _mobilenet,
          "gru": _gru, "transformer256": _transformer256}


def measure(model):
    """Runs the model and appends the record."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, batch = MODELS[model](torch)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    times: dict[str, list[float]] = {name: [] for name in ("forward", "backward", "step")}
    began = 0.0

    def watch(name):
        times[f"ready {name}"] = []
        return lambda _: times[f"ready {name}"].append(time.perf_counter() - began)

    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(watch(name))
    for _ in range(REPEATS + 2):
        optimizer.zero_grad()
        before = time.perf_counter()
        loss = net(batch).square().mean()
        began = time.perf_counter()
        loss.backward()
        done = time.perf_counter()
        optimizer.step()
        for name, taken in (("forward", began - before), ("backward", done - began),
                            ("step", time.perf_counter() - done)):
            times[name].append(taken)
    shapes = {name: list(parameter.shape) for name, parameter in net.named_parameters()}
    return records.append("profile", {"model": model, "batch": list(batch.shape), "shapes": shapes},
                          {name: ("s", values[2:]) for name, values in times.items()})


def load(model: str) -> Profile:
    """Loads the newest record. ValueError: there is none."""
    found = records.read("profile", model=model)
    if not found:
        raise ValueError(f"no profile of {model!r}: run `python -m tests.laboratory.profiles {model}`")
    setting, samples = found[-1].setting, found[-1].samples

    def median(name):
        return statistics.median(samples[name].values)

    gradients = [(name, tuple(shape), median(f"ready {name}")) for name, shape in setting["shapes"].items()]
    return Profile(model, median("forward"), median("backward"), median("step"),
                   sorted(gradients, key=lambda gradient: gradient[2]))


def main(arguments=None):
    """Runs the program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.laboratory.profiles", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=MODELS)
    for model in parser.parse_args(arguments).models:
        measure(model)
        profile = load(model)
        print(f"{model}: {profile.parameters / 1e6:.1f} million parameters, forward {1e3 * profile.forward_s:.1f} ms, "
              f"backward {1e3 * profile.backward_s:.1f} ms, step {1e3 * profile.step_s:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
