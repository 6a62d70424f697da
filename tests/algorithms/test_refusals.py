"""Errors raised by the constructor of an optimizer, each before it changes anything."""
import warnings

import pytest

torch = pytest.importorskip("torch")

import bagua_hvd.torch as hvd  # noqa: E402
from bagua_hvd import codecs  # noqa: E402
from bagua_hvd.algorithms import (  # noqa: E402
    Async,
    ByteGrad,
    Choco,
    Decentralized,
    DiLoCo,
    DoubleSqueeze,
    LocalSGD,
    LowPrecisionDecentralized,
    OneBitAdam,
    PowerSGD,
    QAdam,
    Rotated,
    TopK,
)

WRONG_ARGUMENTS = [
    (Decentralized, {"peer_selection_mode": "star"},
     "peer_selection_mode='star': expected one of all, shift_one, exponential, random, ring"),
    (Async, {"sync_interval_ms": -1}, "sync_interval_ms=-1: expected"),
    (Async, {"sync_interval_ms": float("nan")}, "sync_interval_ms=nan: expected"),
    (Async, {"max_staleness": 0}, "max_staleness=0: expected an integer of 1 or more"),
    (Async, {"warmup_steps": -1}, "warmup_steps=-1: expected an integer"),
    (Decentralized, {"communication_interval": 0}, "communication_interval=0: expected"),
    (LowPrecisionDecentralized, {"communication_interval": 1.5}, "communication_interval=1.5: expected"),
    (LocalSGD, {"communication_interval": True}, "communication_interval=True: expected"),
    (DiLoCo, {"outer_lr": 0}, "outer_lr=0: expected"),
    (DiLoCo, {"outer_momentum": 1}, "outer_momentum=1: expected"),
    (Choco, {"gamma": 0}, "gamma=0: "),
    (Choco, {"gamma": 1.5}, "gamma=1.5: "),
    (DoubleSqueeze, {"momentum": 1}, "momentum=1: expected"),
    (PowerSGD, {"rank": 0}, "rank=0: expected"),
    (QAdam, {"warmup_steps": 0}, "warmup_steps=0: expected"),
    (OneBitAdam, {"warmup_steps": float("inf")}, "warmup_steps=inf: expected"),
    (TopK, {"ratio": 0}, "ratio=0"),
    (TopK, {"bits": 4}, "bits=4.: expected 2 or None"),
    (ByteGrad, {"codec": "sign"}, "codec='sign': expected a codec, such as codecs.sign"),
    (ByteGrad, {"codec": codecs.block}, "codec=<function block"),
    (DoubleSqueeze, {"codec": "block4"}, "codec='block4': expected"),
    (DiLoCo, {"codec": "sign"}, "codec='sign': expected"),
    (Choco, {"codec": "sign"}, "codec='sign': expected"),
    (QAdam, {"codec": "sign"}, "codec='sign': expected"),
    (LocalSGD, {"warmup_steps": "ten"}, "warmup_steps='ten': expected an integer"),
    (LocalSGD, {"communication_interval": "8"}, "communication_interval='8': expected an integer"),
    (PowerSGD, {"rank": "4"}, "rank='4': expected an integer"),
    (DoubleSqueeze, {"momentum": "0.9"}, "momentum='0.9': expected"),
    (DiLoCo, {"outer_lr": "0.7"}, "outer_lr='0.7': expected"),
    (DiLoCo, {"quorum": "2"}, "quorum='2': expected an integer"),
    (Rotated, {"bits": 5}, "bits=5.: expected 1, 2, 3 or 4"),
    (Rotated, {"block": 100}, "block=100.: expected 256, 512, 1024 or 2048"),
]


@pytest.mark.parametrize("algorithm, arguments, sentence", WRONG_ARGUMENTS)
def test_wrong_arguments(algorithm, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        algorithm(**arguments)


def optimizers():
    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(3))

    def refused(sentence, optimizer, algorithm, **arguments):
        with pytest.raises(ValueError, match=sentence):
            hvd.DistributedOptimizer(optimizer, algorithm=algorithm, **arguments)

    sgd, adam = torch.optim.SGD([parameter], lr=0.1), torch.optim.Adam([parameter])
    refused("QAdam cannot serve this optimizer: it needs torch.optim.Adam or AdamW, not SGD", sgd, "qadam")
    refused("OneBitAdam cannot serve this optimizer", sgd, "onebit_adam")
    for option in ("amsgrad", "maximize", "fused"):
        refused(f"cannot serve Adam with {option}=True", torch.optim.Adam([parameter], **{option: True}), "qadam")
    refused("takes the mean over the ranks, not the sum", adam, "qadam", op=hvd.Sum)
    refused("takes the mean over the ranks, not the sum", sgd, "decentralized", op=hvd.Sum)
    refused("cannot be combined with algorithm='bytegrad'", sgd, "bytegrad", op=hvd.Adasum) if hvd.size() > 1 else None
    if hvd.size() == 1:
        refused("needs two ranks or more", sgd, Decentralized(peer_selection_mode="shift_one"))
    with pytest.raises(ValueError, match="warmup_steps=0: expected 1 or more"):
        hvd.QAdamOptimizer([parameter], warmup_steps=0)


@pytest.mark.parametrize("n", [1, 2])
def test_optimizers_that_cannot_be_served(run_ranks, n):
    run_ranks(n, optimizers)


def dtypes():
    """A warning names buckets that the algorithm does not take in the dtype that is sent, after compression."""
    hvd.init()
    none, fp16 = hvd.Compression.none, hvd.Compression.fp16
    for dtype, compression, expected in ((torch.float32, fp16, 1), (torch.float16, none, 1), (torch.float32, none, 0)):
        model = torch.nn.Linear(4, 4).to(dtype)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=compression,
                                             algorithm=ByteGrad(codec=codecs.float32))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(torch.ones(2, 4, dtype=dtype)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        about_dtypes = ["because of their dtype" in str(each.message) for each in caught]
        assert about_dtypes == [True] * (expected if hvd.rank() == 0 else 0)


def test_dtypes(run_ranks):
    run_ranks(2, dtypes)


def synchronous_batch_norm():
    hvd.init()
    for algorithm in (DiLoCo(4, quorum=2, grace_s=0.05), Async()):
        model = torch.nn.Sequential(hvd.SyncBatchNorm(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), algorithm=algorithm)
        with pytest.warns(UserWarning, match="SyncBatchNorm with an asynchronous algorithm"):
            model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        if isinstance(algorithm, Async):
            algorithm.abort()
        del optimizer


def test_synchronous_batch_norm_and_steps_of_one_s_own(run_ranks):
    run_ranks(2, synchronous_batch_norm)
