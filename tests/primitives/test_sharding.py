"""Reduce-scatter and all-gather of codes against the codecs' results for each part."""
import re
from pathlib import Path

import numpy as np
import pytest

from bagua_hvd import codecs
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job import basics
from bagua_hvd.job.process_sets import global_process_set as world
from bagua_hvd.sharding import allgather, reducescatter

CODECS = (codecs.block(4), codecs.block(8, 64, stochastic=True), codecs.minmax_uint8, codecs.float8(), codecs.topk(0.1))
F = np.float32


def values(rank, count, dtype=F):
    return np.random.default_rng(rank).standard_normal(count).astype(dtype)


def round_trip(codec, array, seed=0):
    return codec.decode(codec.encode(array, seed), array.dtype, array.size)


def equations():
    basics.init()
    rank, n = basics.rank(), basics.size()
    begun = []
    for place, codec in enumerate(CODECS):
        dtype = np.float64 if place == 2 else F
        everyone = [values(r, 300 * n, dtype) for r in range(n)]
        shards = [values(50 + r, 700, dtype) for r in range(n)]
        begun.append((codec, everyone, shards,
                      reducescatter(everyone[rank].copy(), world, codec, f"rs.{place}", 7 * rank),
                      allgather(shards[rank].copy(), world, codec, f"ag.{place}", rank)))
    for codec, everyone, shards, scattered, gathered in begun:
        part = slice(300 * rank, 300 * rank + 300)
        total = np.zeros(300, F)
        for r, each in enumerate(everyone):
            total += round_trip(codec, each[part], 7 * r + rank).astype(F)
        np.testing.assert_allclose(scattered.wait(), total, rtol=1e-6, atol=1e-6)
        assert (gathered.wait() == np.concatenate([round_trip(codec, each, r) for r, each in enumerate(shards)])).all()
    x = np.ones(300 * n, F)     # the last seed; the one after it is 0
    scattered = reducescatter(x, world, codecs.rotated(2), "last", 2**64 - 1).wait()
    np.testing.assert_allclose(scattered, n * round_trip(codecs.rotated(2), x[:300], (rank - 1) % 2**64), rtol=1e-6)
    out = np.empty(300, F)
    assert reducescatter(np.ones(300 * n, F), world, CODECS[0], "out").wait(out) is out and (out == n).all()
    for begin, count in ((reducescatter, 300), (allgather, 300 * n * n)):
        begun = begin(np.arange(300 * n, dtype=F), world, codecs.float32, "again")
        for wrong in (np.empty(count + 1, F), np.empty((count, 1), F), np.empty(2 * count, F)[::2]):
            with pytest.raises(ValueError, match=rf"expected a contiguous array of shape \({count},\)"):
                begun.wait(wrong)
        assert (begun.wait() == begun.wait(np.empty(count, F))).all()
        for theirs in (codecs.float8(), codecs.block(8, 128)):      # of as many bytes
            codec = codecs.block(8) if rank == 0 else theirs
            if n > 1:
                with pytest.raises(HorovodInternalError, match=r"Mismatched codecs: rank \d .* and this rank"):
                    begin(np.ones(64 * n, F), world, codec, "mixed").wait()
    for wrong in (np.ones(300 * n + 1, F), np.ones((n, 3), F)):
        with pytest.raises(ValueError, match="is not flat, or not to be shared by") if n > 1 or wrong.ndim > 1 \
                else pytest.raises(AssertionError):
            reducescatter(wrong, world, CODECS[0], "wrong").wait()
            assert n > 1
    with pytest.raises(ValueError, match="does not take dtype"):
        allgather(np.ones(3, np.int32), world, CODECS[0], "wrong")


@pytest.mark.parametrize("n", [1, 2, 3])
def test_equal_their_equations(run_ranks, n):
    run_ranks(n, equations, env={"HOROVOD_ELASTIC": "1"}, timeout=110)


def code_of_page():
    """Runs the code of docs/sharding.md: each step halves the distance of the weights from 1."""
    page = (Path(__file__).parents[2] / "docs/sharding.md").read_text()
    code, = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "bagua_hvd.sharding" in code)
    found = {}
    exec(code, found)
    assert len(found["weights"]) == 1000 * basics.size() and abs(found["weights"] - 1).max() < 0.02


def test_code_of_the_page(run_ranks):
    pytest.importorskip("torch")
    run_ranks(2, code_of_page)


def bytes_of_codes():
    basics.init()
    context, count = basics.context(), 512 * 300
    for post, expected in (
            (lambda x: reducescatter(x, world, codecs.block(4), "rs"), count * (1 / 2 + 1 / 64) * 2 / 3),
            (lambda x: allgather(x[:count // 3], world, codecs.block(8), "ag"), count / 3 * 65 / 64 * 2)):
        before = context.counters().payload_bytes_sent
        post(values(basics.rank(), count)).wait()
        sent = context.counters().payload_bytes_sent - before
        assert abs(sent - expected) < 0.05 * expected, (sent, expected)


def test_bytes(run_ranks):
    run_ranks(3, bytes_of_codes, env={"BAGUA_HVD_TRANSPORT": "tcp"}, timeout=110)
