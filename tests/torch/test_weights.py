"""set_weight(): averages weighted by samples equal those of one process on all the data."""
import copy
import math
import time
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import bagua_hvd.torch as hvd
from bagua_hvd.codecs import float32
from bagua_hvd.core.exceptions import HorovodInternalError

# Samples of each of three ranks, by step.
COUNTS = [(4, 1, 7), (0, 3, 2), (5, 5, 5), (0, 0, 6)]
STEPS = range(len(COUNTS))


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def samples(step, rank, count):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(count, width, generator=generator, dtype=torch.float64) for width in (4, 2))


def everyones(step):
    parts = [tuple(samples(step, rank, count)) for rank, count in enumerate(COUNTS[step])]
    return (torch.cat([part[which] for part in parts]) for which in (0, 1))


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def one_process(steps=STEPS, make=torch.optim.SGD, lr=0.1):
    model = model_of()
    opt = make(model.parameters(), lr=lr)
    for step in steps:
        opt.zero_grad()
        x, y = everyones(step)
        mse_loss(model(x), y).backward()
        opt.step()
    return flat(model)


def wrapped(model, make=torch.optim.SGD, lr=0.1, **options):
    return hvd.DistributedOptimizer(make(model.parameters(), lr=lr), model.named_parameters(), **options)


def train(opt, model, steps=STEPS):
    for step in steps:
        count = COUNTS[step][hvd.rank()]
        x, y = samples(step, hvd.rank(), count)
        opt.zero_grad()
        opt.set_weight(count)
        mse_loss(model(x), y).backward()        # NaN where there are no samples
        opt.step()


def same_as_one_process():
    hvd.init()
    for make in (torch.optim.SGD, torch.optim.Adam):
        expected = one_process(make=make)
        for options in ({}, {"gradients_untouched": True}, {"groups": 2}, {"gradient_predivide_factor": 2.0},
                        {"algorithm": hvd.algorithms.ByteGrad(codec=float32)},
                        {"algorithm": hvd.algorithms.PowerSGD(100)}):
            model = model_of()
            train(wrapped(model, make, **options), model)
            torch.testing.assert_close(flat(model), expected, rtol=1e-6, atol=1e-7, msg=str((make, options)))


def test_same_as_one_process(run_ranks):
    run_ranks(3, same_as_one_process)


def codecs():
    """Weighted averages have the codec error of plain averages of gradients that are weighted beforehand."""
    hvd.init()
    for algorithm in ("bytegrad", "rotated", "topk", "doublesqueeze"):
        weighted, plain = model_of().float(), model_of().float()
        opt, other = wrapped(weighted, algorithm=algorithm), wrapped(plain, algorithm=algorithm)
        for step, counts in enumerate(COUNTS):
            count = counts[hvd.rank()]
            x, y = (each.float() for each in samples(step, hvd.rank(), count))
            for optimizer in (opt, other):
                optimizer.zero_grad()
            opt.set_weight(count)
            mse_loss(weighted(x), y).backward()
            factor = hvd.size() * count / sum(counts)
            (mse_loss(plain(x), y) * factor if count else plain(torch.ones(1, 4)).sum() * 0).backward()
            opt.step()
            other.step()
        torch.testing.assert_close(flat(weighted), flat(plain), rtol=1e-4, atol=1e-5, msg=algorithm)


def test_codecs(run_ranks):
    run_ranks(3, codecs)


def several_windows():
    """Accumulated passes, no_sync(), ranks without a backward pass, sparse gradients, one step late."""
    hvd.init()
    count = COUNTS[0][hvd.rank()]
    x, y = samples(0, hvd.rank(), count)
    expected = one_process([0, 0])
    for options in ({"backward_passes_per_step": 2}, {}):
        model = model_of()
        opt = wrapped(model, **options)
        for _ in range(2):      # in the first one, no bucket is posted before all passes have ended
            opt.zero_grad()
            if options:
                opt.set_weight(1 + hvd.rank())      # the last weight of a window counts
                (mse_loss(model(x), y) / 4).backward()
            else:
                with opt.no_sync():
                    (mse_loss(model(x), y) / 4).backward()
            opt.set_weight(count)
            (mse_loss(model(x), y) * 3 / 4).backward()
            opt.step()
        torch.testing.assert_close(flat(model), expected)
    # A weight that is set when buckets are in flight is that of the next window.
    model = model_of()
    opt = wrapped(model, gradients_untouched=True)
    for step in range(3):
        opt.zero_grad()
        if step < 2:
            opt.set_weight(count)
        mse_loss(model(x), y).backward()
        if step == 1:
            opt.set_weight(count)
        opt.step()
    torch.testing.assert_close(flat(model), one_process([0] * 3))
    # A rank without samples may skip its backward pass.
    model = model_of()
    opt = wrapped(model)
    for step in range(len(COUNTS)):
        samples_here = COUNTS[step][hvd.rank()]
        opt.zero_grad()
        opt.set_weight(samples_here)
        if samples_here:
            x, y = samples(step, hvd.rank(), samples_here)
            mse_loss(model(x), y).backward()
        opt.step()
    torch.testing.assert_close(flat(model), one_process())
    # Without set_weight() the next step is an equal average again.
    before, mean = flat(model), sum(r + 1.0 for r in range(hvd.size())) / hvd.size()
    opt.zero_grad()
    (flat_sum(model) * (hvd.rank() + 1.0)).backward()
    opt.step()
    torch.testing.assert_close(flat(model), before - 0.1 * mean)
    sparse()
    late()


def flat_sum(model):
    return sum(parameter.sum() for parameter in model.parameters())


def sparse():
    table = nn.Embedding(5, 2, sparse=True)
    nn.init.zeros_(table.weight)
    opt = wrapped(table, lr=1.0)
    for _ in range(2):
        opt.zero_grad()
        opt.set_weight(hvd.rank() + 1)
        table(torch.tensor([hvd.rank()])).sum().backward()
        opt.step()
    expected = torch.zeros(5, 2)
    for rank in range(hvd.size()):
        expected[rank] = -2.0 * (rank + 1) / sum(range(1, hvd.size() + 1))
    torch.testing.assert_close(table.weight.detach(), expected)


def late():
    model = model_of()
    opt = wrapped(model, delay=1)
    for _ in range(2):
        opt.zero_grad()
        opt.set_weight(COUNTS[0][hvd.rank()])
        x, y = samples(0, hvd.rank(), COUNTS[0][hvd.rank()])
        mse_loss(model(x), y).backward()
        opt.step()
    torch.testing.assert_close(flat(model), one_process([0]))


def test_several_windows(run_ranks):
    run_ranks(3, several_windows)


def dropped():
    """reset() forgets a weight that another rank has not given yet, and the next one waits for it."""
    hvd.init()
    model = model_of()
    opt = wrapped(model)
    if hvd.rank() == 2:
        time.sleep(1)
    for _ in range(2):
        opt.set_weight(1)
        opt.load_state_dict(opt.state_dict())
    train(opt, model)
    torch.testing.assert_close(flat(model), one_process())
    with suppress(HorovodInternalError):        # another rank may have left already
        opt.set_weight(1)
    opt.load_state_dict(opt.state_dict())
    hvd.shutdown()
    hvd.init()
    train(opt, model, [0])


def test_dropped(run_ranks):
    run_ranks(3, dropped)


def joined():
    """A joined rank has weight zero."""
    hvd.init()
    counts = [(2, 3, 4), (5, 0, 1), (1, 2, 0)]      # rank 2 has two batches only
    model, reference = model_of(), model_of()
    opt, alone = wrapped(model), torch.optim.SGD(reference.parameters(), lr=0.1)
    for step, of_ranks in enumerate(counts):
        parts = [tuple(samples(step, rank, count)) for rank, count in enumerate(of_ranks)]
        alone.zero_grad()
        x, y = (torch.cat([part[which] for part in parts]) for which in (0, 1))
        mse_loss(reference(x), y).backward()
        alone.step()
        if hvd.rank() == 2 and step == 2:
            break
        opt.zero_grad()
        opt.set_weight(of_ranks[hvd.rank()])
        x, y = parts[hvd.rank()]
        mse_loss(model(x), y).backward()
        opt.step()
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if hvd.rank() < 2:
        torch.testing.assert_close(flat(model), flat(reference))


def test_joined(run_ranks):
    run_ranks(3, joined)


def wrong():
    hvd.init()
    model = model_of()
    opt = wrapped(model)
    before = flat(model)
    cases = [((1, -2, 3), "rank 1 gave an invalid one"), ((math.nan, 1, 1), "rank 0 gave"),
             ((1, 1, math.inf), "rank 2"), ((1, None, 1), "rank 1 gave"), ((1, 10**400, 1), "rank 1 gave"),
             ((-1, 1, -1), "2 ranks gave"), ((0, 0, 0), "all ranks are 0")]
    for weights, sentence in cases:
        for touches in (True, False):
            opt.zero_grad()
            opt.set_weight(weights[hvd.rank()])
            with pytest.raises(ValueError, match=sentence):
                if touches:
                    model(torch.ones(2, 4).double()).sum().backward()
                opt.step()
    assert torch.equal(flat(model), before)
    train(opt, model, [0])          # the job continues
    torch.testing.assert_close(flat(model), one_process([0]))
    for options, sentence in (({"op": hvd.Sum}, "hvd.Average"), ({"algorithm": "diloco"}, "DiLoCo does not average"),
                              ({"algorithm": "onebit_adam", "make": torch.optim.Adam}, "OneBitAdam does not")):
        with pytest.raises(ValueError, match=sentence):
            wrapped(copy.deepcopy(model), **options).set_weight(1)


def test_wrong(run_ranks):
    run_ranks(3, wrong)


def alone():
    hvd.init()
    model = model_of()
    opt = wrapped(model)
    for weight in (-1, math.nan, 0, "many"):
        with pytest.raises(ValueError, match=r"is 0|are 0|finite"):
            opt.set_weight(weight)
    opt.set_weight(3)
    with pytest.raises(ValueError, match="LBFGS makes several"):
        wrapped(model, torch.optim.LBFGS).set_weight(3)


def test_alone(run_ranks):
    run_ranks(1, alone)
