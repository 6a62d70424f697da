"""The traffic of configurations that are not in bench/predict.py, and their step times by its formula."""
import math

from bagua_hvd.bench import predict
from bagua_hvd.bench.predict import BLOCK4, HIDDEN, LATE, Network, Profile, Sends

STEP = "after the backward pass"
DDP_NBYTES = 25 << 20
BLOCK8 = (8 + 32 / 256) / 32       # of float32's bytes
# Configurations that it has, by name.
WAYS = {**{name: name for name in ("gradient_allreduce", "bytegrad", "rotated", "powersgd")},
        "onebit_adam": "onebit_adam, gradients_untouched", "diloco": "diloco", "async": "async, at once"}


def sends(way: str, n: int, count: float, thin: float = 0) -> Sends:
    """thin: rows and columns of all matrices. Raises KeyError: an unknown way."""
    part, log, ring = (n - 1) / n, max(1, math.ceil(math.log2(n))), min(2, n - 1)
    exact = 8 * count * part
    known = {
        **{way: predict.sends(name, n, count, thin) for name, way in WAYS.items()},
        "none": Sends(0, 0, HIDDEN),
        **{name: Sends(exact, 2 * log) for name in ("ddp", "gradient_allreduce, Adam")},
        "ddp, fp16 hook": Sends(exact / 2, 2 * log), "ddp, PowerSGD hook": Sends(8 * part * 4 * thin, 4 * log, STEP),
        "bytegrad, delay": Sends(exact / 4, 2, LATE),
        "gradient_allreduce, delay": Sends(exact, 2 * log, LATE),
        "doublesqueeze": Sends(exact / 32, 2), "topk": Sends(0.24 * count * (n - 1), 1),
        "qadam": Sends(exact / 4, 2, STEP), "qadam, gradients_untouched": Sends(exact / 4, 2),
        "onebit_adam": Sends(exact / 32, 2, STEP),
        **{f"bytegrad, {codec}": Sends(exact * BLOCK8, 2) for codec in ("block(8)", "float8", "float8, Adam")},
        "bytegrad, block(4)": Sends(exact * BLOCK4, 2),
        "doublesqueeze, block(4)": Sends(exact * BLOCK4, 2), "topk, 10 %": Sends(0.8 * count * (n - 1), 1),
        "decentralized": Sends(exact, 2 * log), "decentralized, shift_one": Sends(4 * count, 1),
        "low_precision_decentralized": Sends(count * ring, 1, STEP), "choco": Sends(count / 8 * ring, 1, STEP),
        "local_sgd": Sends(exact, 2 * log, STEP, 4), "local_sgd, 2": Sends(exact, 2 * log, STEP, 2),
        **{f"diloco, {steps}": Sends(exact, 2 * log, STEP, steps) for steps in (8, 16)},
        "async": Sends(0, 0, HIDDEN),
    }
    return known[way]


def step_s(way: str, profile: Profile, network: Network) -> float:
    """Seconds of a step."""
    said = sends(way, network.hosts, profile.parameters, predict.thin(profile))
    if said.when == STEP:
        took = said.nbytes * predict.FRAMING / network.bytes_per_s + (said.rounds + 2) * network.latency_s
        return profile.computing_s + took / said.period
    return predict.step_s(said, profile, network, DDP_NBYTES if way.startswith("ddp") else predict.BUCKET_NBYTES)
