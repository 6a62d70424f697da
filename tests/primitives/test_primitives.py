"""The primitives as Python calls, over buckets and arrays, between real processes."""
import numpy as np
import pytest

from bagua_hvd import primitives
from bagua_hvd.core import native, vectors
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job import basics, process_sets
from bagua_hvd.job.process_sets import global_process_set as world
from bagua_hvd.primitives import ErrorState, Replicas, c_fp_s, c_lp_s, d_fp_s, d_lp_s, minmax_uint8
from bagua_hvd.training.buckets import Bucket, Member
from floats import assert_same_bits
from low_precision import CODECS, allgather, scatter_gather, segment_seed

MINMAX = CODECS[0]
F = np.float32


def bucket_over(arrays, name, **factors):
    bucket = Bucket(name, {i: Member(f"{name}.{i}", a.shape, native.FLOAT32) for i, a in enumerate(arrays)}, **factors)
    for i, array in enumerate(arrays):
        bucket.place(i, vectors.array_view(array))
    return bucket


def values(rank, step=0, count=1003):
    return np.random.default_rng([rank, step]).standard_normal(count).astype(F)


def over_arrays():
    basics.init()
    rank, n = basics.rank(), basics.size()
    everyone = [values(r) for r in range(n)]
    mine = everyone[rank].copy()
    # All in flight at once, under different names.
    central, low, gathered, paired, ringed = (np.empty_like(mine) for _ in range(5))
    own, left, right = (np.zeros_like(mine) for _ in range(3))
    operations = [
        c_fp_s(mine, world, out=central, name="central"),
        c_lp_s(mine, world, out=low, name="low"),
        c_lp_s(mine, world, exchange="allgather", average=False, prescale_factor=2.0, out=gathered, name="gathered"),
        d_fp_s(mine, world, round=1, out=paired, name="paired"),
        d_fp_s(mine, world, "ring", out=ringed, name="ringed"),
        d_lp_s(mine, world, minmax_uint8, Replicas(own, left, right), name="codes"),
    ]
    for operation in operations:
        operation.wait()
    assert_same_bits(mine, everyone[rank], "only read")
    np.testing.assert_allclose(central, np.mean(everyone, 0), rtol=0, atol=1e-6)
    seeds = [0] * n
    assert_same_bits(low, scatter_gather(MINMAX, "float32", everyone, seeds, 1 / n))
    assert_same_bits(gathered, allgather(MINMAX, "float32", [2 * x for x in everyone], seeds, 1))
    peer = {1: [0], 2: [1, 0], 3: [1, 0, 2], 4: [3, 2, 1, 0]}[n][rank]
    assert_same_bits(paired, mine if peer == rank else (mine + everyone[peer]) * F(0.5))
    ring = (mine + everyone[rank - 1] + everyone[(rank + 1) % n]) * F(1 / 3) if n > 1 else mine
    assert_same_bits(ringed, ring)
    sent = [MINMAX.round_trip("float32", x, 0) for x in everyone]
    assert_same_bits(own, sent[rank])
    assert_same_bits(left, sent[rank - 1])
    assert_same_bits(right, sent[(rank + 1) % n])
    d_fp_s(mine[:1000].reshape(10, 100), world, "ring", name="ringed").wait()
    assert_same_bits(mine[:1000], ring[:1000])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_over_arrays(run_ranks, n):
    run_ranks(n, over_arrays)


def over_buckets():
    basics.init()
    rank, n = basics.rank(), basics.size()
    everyone = [values(r) for r in range(n)]
    parts = [part.copy() for part in np.split(everyone[rank], [3, 3, 500])]
    bucket = bucket_over(parts, "bucket", prescale_factor=2.0, postscale_factor=0.5)
    out, bits = np.empty(1003, F), np.empty(1003, np.uint32)
    c_lp_s(bucket, world, out=out).wait()
    assert_same_bits(out, scatter_gather(MINMAX, "float32", [2 * x for x in everyone], [0] * n, 0.5 / n))
    d_fp_s(bucket, world, "ring", out=bits).wait()
    ring = everyone[rank] + everyone[rank - 1] + everyone[(rank + 1) % n]
    assert_same_bits(bits.view(F), ring * F(1 / 3))
    assert_same_bits(np.concatenate(parts), everyone[rank], "only read")
    replicas = Replicas(np.zeros(1003, F), None, None)
    d_lp_s(bucket, world, minmax_uint8, replicas).wait()
    assert_same_bits(replicas.own, MINMAX.round_trip("float32", everyone[rank], 0))
    d_fp_s(bucket, world, "ring").wait()                                # in place
    assert_same_bits(np.concatenate(parts), ring * F(1 / 3))
    both = [c_fp_s(bucket, world, name="first", out=out), c_fp_s(bucket, world, name="second", out=bits)]
    for operation in both:
        operation.wait()
    assert_same_bits(out, bits.view(F))


def test_over_buckets(run_ranks):
    run_ranks(2, over_buckets)


def stochastic_codecs():
    """The meaning of seed=; without a seed, two calls give different results."""
    basics.init()
    rank, n = basics.rank(), basics.size()
    codec = primitives.block(4, 64, stochastic=True)
    oracle = next(c for c in CODECS if c.stochastic and c.parameter == 64)
    everyone = [values(r) for r in range(n)]
    out = np.empty_like(everyone[0])
    c_lp_s(everyone[rank], world, codec, seed=100 + rank, out=out, name="seeded").wait()
    assert_same_bits(out, scatter_gather(oracle, "float32", everyone, [100 + r for r in range(n)], 1 / n))
    replicas = Replicas(np.zeros_like(out), None, None)
    d_lp_s(everyone[rank], world, codec, replicas, seed=2**64 - 1, name="seeded").wait()
    assert_same_bits(replicas.own, oracle.round_trip("float32", everyone[rank], segment_seed(2**64 - 1, rank, 0, 0)))
    first, second = np.empty_like(out), np.empty_like(out)
    c_lp_s(everyone[rank], world, codec, out=first, name="fresh").wait()
    c_lp_s(everyone[rank], world, codec, out=second, name="fresh").wait()
    assert (first != second).any()


def test_stochastic_codecs(run_ranks):
    run_ranks(2, stochastic_codecs)


def disagreements_and_wrong_calls():
    basics.init(process_sets=[process_sets.ProcessSet([0])])
    rank, array = basics.rank(), np.ones(8, F)
    with pytest.raises(HorovodInternalError, match="round 0.*round 1|round 1.*round 0"):
        d_fp_s(array, world, round=rank, name="rounds").wait()
    with pytest.raises(HorovodInternalError, match="Mismatched codecs"):
        c_lp_s(array, world, exchange=("allgather", "scatter_gather")[rank], name="exchanges").wait()
    with pytest.raises(ValueError, match="needs a name"):
        d_fp_s(array, world)
    with pytest.raises(ValueError, match="topology='star': expected one of shift_one, ring, exponential, round_robin"):
        d_fp_s(array, world, "star", name="wrong")
    with pytest.raises(ValueError, match="exchange='ring'"):
        c_lp_s(array, world, exchange="ring", name="wrong")
    with pytest.raises(ValueError, match="does not fit 8 elements over 2 ranks"):
        c_lp_s(array, world, error=ErrorState(7, 2), name="wrong")
    with pytest.raises(ValueError, match=r"a replica is .* not float32\[8\]"):
        d_lp_s(array, world, minmax_uint8, Replicas(np.zeros(7, F), None, None), name="wrong")
    replicas = Replicas(np.zeros(8, F), None, None)
    for sentence, call in {
        "average='no': expected a bool": lambda: c_fp_s(array, world, average="no", name="wrong"),
        "prescale_factor='2': expected a number": lambda: c_fp_s(array, world, prescale_factor="2", name="wrong"),
        r"out=\[0.0\]: expected a NumPy array": lambda: c_fp_s(array, world, out=[0.0], name="wrong"),
        "a primitive takes a str as `name`, not 3": lambda: c_fp_s(array, world, name=3),
        "error='x': expected an ErrorState": lambda: c_lp_s(array, world, error="x", name="wrong"),
        "seed='1': expected an integer": lambda: c_lp_s(array, world, seed="1", name="wrong"),
        "a codec is one of": lambda: c_lp_s(array, world, "sign", name="wrong"),
        "round=1.5: expected an integer": lambda: d_fp_s(array, world, round=1.5, name="wrong"),
        "hierarchical='yes': expected a bool": lambda: d_fp_s(array, world, hierarchical="yes", name="wrong"),
        "replicas=None: expected Replicas": lambda: d_lp_s(array, world, minmax_uint8, None, name="wrong"),
        "count='8': expected an integer": lambda: ErrorState("8", 2),
    }.items():
        with pytest.raises(TypeError, match=sentence):
            call()
    with pytest.raises(ValueError, match="it has a NUL character"):
        c_fp_s(array, world, name="wrong\0")
    with pytest.raises(ValueError, match=r"before=\(0, 1\): expected 3 numbers"):
        d_lp_s(array, world, minmax_uint8, replicas, name="wrong", before=(0, 1))
    with pytest.raises(ValueError, match=r"topology=\[\]: expected one of"):
        d_fp_s(array, world, [], name="wrong")
    for out in (np.zeros(7, F), np.zeros(8), np.zeros((2, 8), F)[:, 0], np.zeros(8, ">f4")):
        with pytest.raises(ValueError, match="out is"):
            d_fp_s(bucket_over([array], "wrong"), world, out=out)
    assert (array == 1).all()
    # Nothing is left in flight, and a set of one rank needs no other.
    alone = process_sets.ProcessSet([0])
    alone.process_set_id = 1
    if rank == 0:
        d_fp_s(array, alone, name="alone").wait()
    c_fp_s(array, world, average=False, name="rounds").wait()
    assert (array == 2).all()


def test_disagreements_and_wrong_calls(run_ranks):
    run_ranks(2, disagreements_and_wrong_calls)


def test_states_are_float32():
    error = ErrorState(8, 2)
    for wrong in (np.zeros(8), np.zeros((2, 8), F)[:, 0], np.zeros(8, ">f4")):
        with pytest.raises(ValueError, match="is kept by the core as float32|arrays of dtype >f4|must be contiguous"):
            error.worker = wrong
        with pytest.raises(ValueError, match="is kept by the core as float32|arrays of dtype >f4|must be contiguous"):
            Replicas(None, wrong, None)


def test_states_are_saved_and_only_like_ones_loaded():
    replicas = Replicas(np.arange(4, dtype=F), None, np.ones(4, F))
    state = replicas.state_dict()
    other = Replicas(np.zeros(4, F), None, np.zeros(4, F))
    assert other.load_state_dict(state)
    assert other.state_dict() == state
    assert_same_bits(other.own, replicas.own)
    assert not Replicas(np.zeros(5, F), None, np.zeros(4, F)).load_state_dict(state)
    assert not Replicas(np.zeros(4, F), np.zeros(4, F), np.zeros(4, F)).load_state_dict(state)
    error = ErrorState(10, 3)
    assert (len(error.worker), len(error.server)) == (10, 4)
    assert error.load_state_dict(ErrorState(10, 3).state_dict())
    assert not error.load_state_dict(ErrorState(10, 2).state_dict())
