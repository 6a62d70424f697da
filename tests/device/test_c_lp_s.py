"""C_LP_S of tensors on a device whose kernels encode and decode, with error feedback in device memory.

No GPU is used: the driver is a fake (fake_cuda.c), the kernels are compiled for the CPU. Expected: the same operation
in host memory, values and errors, bit for bit.
"""
import itertools

import numpy as np
import pytest

from bagua_hvd.core import native, vectors
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.primitives import ErrorState
from device_arrays import (
    FakePlacement,
    fake_cuda,
    fake_device_with_kernels,
    fake_devices_with_kernels_but_one,
    own_device,
)
from device_codes import CODED, SHAPES, WORLDS, assert_equal, values
from low_precision import CODECS
from world import World, view

STEPS = 2


@pytest.fixture
def world(n, transport):
    with World(n, transport) as world:
        yield world


def post(context, name, views, codec, error=None, step=0, **arguments):
    fields = codec.fields(seed=7 + step)
    context.post(native.C_LP_S, name, views, op=native.OP_AVERAGE, owner=error, **fields,
                 **(error.fields() if error else {}), **arguments).wait()


def train(rank, context, device, codec, dtype, shapes, errors, steps=STEPS, **arguments):
    """Runs the same steps on the host and on the device, and returns both results."""
    n, name = context.process_set_size(0), f"{codec}.{dtype}.{shapes}.{arguments}"
    placement = FakePlacement(device)
    count = sum(int(np.prod(shape)) for shape in shapes)
    on_host, on_device = (ErrorState(count, n) if errors else None for _ in range(2))
    results = []
    for step in range(steps):
        host = values(dtype, shapes, rank, n, step)
        arrays = [placement.array(x.copy(), dtype) for x in host]
        post(context, f"host.{name}", [view(x, dtype, "in place") for x in host], codec, on_host, step, **arguments)
        post(context, f"gpu.{name}", [array.view(array) for array in arrays], codec, on_device, step, **arguments)
        results += [(array.numpy(), x) for array, x in zip(arrays, host, strict=True)]
    if errors:
        results += [(on_device.worker, on_host.worker), (on_device.server, on_host.server)]
    return results


CASES = [
    ("float32", SHAPES, True, native.EXCHANGE_SCATTER_GATHER),
    ("float32", [(1027,)], False, native.EXCHANGE_ALLGATHER),
    ("float16", [(1027,)], True, native.EXCHANGE_SCATTER_GATHER),
    ("bfloat16", SHAPES, True, native.EXCHANGE_ALLGATHER),
    ("float64", [(2,)], True, native.EXCHANGE_SCATTER_GATHER),
]


@WORLDS
@pytest.mark.parametrize("codec", CODED, ids=lambda codec: f"{codec.name}{codec.parameter or ''}")
def test_every_codec(world, codec):
    """Several tensors and one, every dtype, with and without error feedback, both variants of the operation."""
    device = fake_device_with_kernels()
    before = fake_cuda().launches()

    def call(rank, context):
        return [pair for dtype, shapes, errors, exchange in CASES
                for pair in train(rank, context, device, codec, dtype, shapes, errors, exchange=exchange)]

    assert_equal(world.run(call))
    assert fake_cuda().launches() - before >= 2 * STEPS * len(CASES) * world.n


@pytest.mark.parametrize("n, transport", [(2, "shm")])
def test_factors_and_segments(world):
    """Chunks of several segments, of which the shorter chunk lacks the last; scaled before and after."""
    device = fake_device_with_kernels()
    arguments = {"prescale_factor": 0.3, "postscale_factor": 3.0}

    def call(rank, context):
        return [pair for codec, count in ((CODED[3], 10), (CODED[0], 2 * (1 << 18) + 1))
                for pair in train(rank, context, device, codec, "float32", [(count,)], True, steps=1, **arguments)]

    assert_equal(world.run(call))


@pytest.mark.parametrize("n, transport", [(3, "shm")])
def test_each_rank_encodes_where_it_can(world):
    """The last rank's device has no kernels, yet all ranks send the same bytes."""
    devices = fake_devices_with_kernels_but_one(world.n)

    def call(rank, context):
        return [pair for codec in CODED[::2]
                for pair in train(rank, context, devices[rank], codec, "float32", SHAPES, True)]

    assert_equal(world.run(call))


@pytest.mark.parametrize("n, transport", [(2, "shm")])
def test_what_goes_by_way_of_the_host(world):
    """Codecs without kernels; results on the host with errors that were on the device one step earlier."""
    device = fake_device_with_kernels()
    float16, topk = (next(codec for codec in CODECS if codec.name == name) for name in ("float16", "topk"))

    def call(rank, context):
        placement, error, expected = FakePlacement(device), ErrorState(50, 2), ErrorState(50, 2)
        results = train(rank, context, device, float16, "float32", [(50,)], True)
        for errors in (False, True):
            results += train(rank, context, device, topk, "float32", [(700,)], errors)
        for step in range(2):
            (host,) = values("float32", [(50,)], rank, 2, step)
            array, out = placement.array(host.copy()), np.zeros(50, np.float32)
            on_host = vectors.views_into([array.view()], out)
            post(context, "out", on_host if step else [array.view(array)], CODED[1], error, step)
            post(context, "expected", [view(host, "float32", "in place")], CODED[1], expected, step)
            results.append((out if step else array.numpy(), host))
        return [*results, (error.worker, expected.worker)]

    assert_equal(world.run(call))


def test_in_two_levels_the_host_encodes():
    hosts = ["a", "a", "b", "b"]
    with World(4, "auto", hosts=hosts) as world:
        device = fake_device_with_kernels()
        before = fake_cuda().launches()

        def call(rank, context):
            placement, codec = FakePlacement(device), CODED[0]
            on_host, on_device = ErrorState(500, 4, True), ErrorState(500, 4, True)
            (x,) = values("float32", [(500,)], rank, 4)
            array = placement.array(x.copy())
            post(context, "host", [view(x, "float32", "in place")], codec, on_host, hierarchical=1)
            post(context, "gpu", [array.view(array)], codec, on_device, hierarchical=1)
            return [(array.numpy(), x), (on_device.worker, on_host.worker), (on_device.server, on_host.server)]

        assert_equal(world.run(call))
        assert fake_cuda().launches() == before


@pytest.mark.parametrize("n, transport", [(2, "shm")])
def test_a_checkpoint_holds_the_errors(world):
    """Saved after two steps and loaded into new memory; from then on both continue identically."""
    device, codec = fake_device_with_kernels(), CODED[1]

    def call(rank, context):
        placement, first, second, whole = FakePlacement(device), *(ErrorState(300, 2) for _ in range(3))
        results = []
        for step in range(4):
            (x,) = values("float32", [(300,)], rank, 2, step)
            array = placement.array(x.copy())
            if step == 2:
                assert np.any(first.state_dict() != ErrorState(300, 2).state_dict())
                assert second.load_state_dict(first.state_dict())
            post(context, "gpu", [array.view(array)], codec, second if step >= 2 else first, step)
            post(context, "host", [view(x, "float32", "in place")], codec, whole, step)
            results.append((array.numpy(), x))
        return [*results, (second.worker, whole.worker), (second.server, whole.server)]

    assert_equal(world.run(call))


@pytest.mark.parametrize("n, transport", [(2, "shm")])
def test_copies_of_errors_are_made_on_the_gpu(world):
    """Copies keep the errors whatever happens to the original; they are on the host before the first operation."""
    device, codec = fake_device_with_kernels(), CODED[1]

    def call(rank, context):
        placement, error, pairs = FakePlacement(device), ErrorState(300, 2), []
        error.worker[:] = 0.5
        copies = [error.copy()]
        pairs.append((copies[0].worker, np.full(300, 0.5, np.float32)))
        for step in range(3):
            (x,) = values("float32", [(300,)], rank, 2, step)
            array = placement.array(x.copy())
            post(context, "gpu", [array.view(array)], codec, error, step)
            before = fake_cuda().link_bytes()
            copies.append(error.copy())
            assert world.n > 1 or fake_cuda().link_bytes() == before
            pairs.append((copies[-1].copy().worker, copies[-1].worker))
        pairs += [(copies[-1].worker, error.worker.copy()), (copies[-1].server, error.server.copy())]
        assert not np.array_equal(copies[1].worker, copies[2].worker)
        error.scale(2)
        pairs.append((2 * copies[-1].worker, error.worker))
        return pairs

    assert_equal(world.run(call))


@pytest.mark.parametrize("n, transport", [(2, "shm")])
def test_what_fails_changes_no_errors(world):
    device, codec = fake_device_with_kernels(), CODED[1]

    def call(rank, context):
        placement, error = FakePlacement(device), ErrorState(40, 2)
        (x,) = values("float32", [(40,)], rank, 2)
        array = placement.array(x.copy())
        post(context, "good", [array.view(array)], codec, error)
        kept = error.worker.copy()
        with pytest.raises(HorovodInternalError, match="Mismatched"):
            post(context, "bad", [array.view(array)], codec if rank else CODED[0], error)
        np.testing.assert_array_equal(error.worker, kept)
        assert kept.any()

    world.run(call)


# ------------------------------------------------------------------------------------------------------------ by NCCL


@pytest.mark.parametrize("n, transport", [(1, "inproc"), (2, "shm"), (3, "tcp")])
@pytest.mark.parametrize("codec", [*CODED[:2], *CODED[3:5], CODED[-3]], ids=lambda codec: codec.name)
def test_every_codec_by_nccl(world, codec):
    """The first operation is staged before the ranks agree on NCCL; NCCL executes all."""
    devices = [own_device(rank) for rank in range(world.n)]
    before = fake_cuda().nccl_groups()

    def call(rank, context):
        return [pair for dtype, shapes, errors, exchange in CASES
                for pair in train(rank, context, devices[rank], codec, dtype, shapes, errors, exchange=exchange)]

    assert_equal(world.run(call))
    groups = sum(2 if case[3] == native.EXCHANGE_SCATTER_GATHER else 1 for case in CASES) * STEPS
    assert fake_cuda().nccl_groups() - before >= (groups if world.n > 1 else STEPS) * world.n


@pytest.mark.parametrize("n, transport", [(3, "shm")])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("by_nccl", [True, False])
def test_means_of_rotated_codes(world, dtype, by_nccl):
    """Ranks with equal and with different seeds; blocks of zeros, with a NaN, and of tiny numbers."""
    def call(rank, context):
        results, codec = [], CODED[-3]
        placement = FakePlacement(own_device(rank) if by_nccl else fake_device_with_kernels())
        for equal, errors in itertools.product((True, False), (False, True)):
            (host,) = values(dtype, [(6000,)], rank, 3)
            host[:700] = 0
            host[2000:3000] *= 1e-20 if dtype == "float32" else 0
            host[4000] = np.nan if rank == 1 else 1
            array = placement.array(host.copy(), dtype)
            memory = [ErrorState(6000, 3) if errors else None for _ in range(2)]
            for views, error, where in (([view(host, dtype, "in place")], memory[0], "host"),
                                        ([array.view(array)], memory[1], "gpu")):
                post(context, f"{where}.{equal}.{errors}", views, codec, error, step=0 if equal else rank)
            results.append((array.numpy(), host))
            if errors:
                results += [(memory[1].worker, memory[0].worker), (memory[1].server, memory[0].server)]
        return results

    assert_equal(world.run(call))


@pytest.mark.parametrize("n, transport", [(2, "shm")])
def test_errors_move_between_nccl_and_the_host(world):
    """Results on the host by NCCL; codecs without kernels on NCCL's ranks; errors read in between."""
    devices = [own_device(rank) for rank in range(2)]
    float16, topk = (next(codec for codec in CODECS if codec.name == name) for name in ("float16", "topk"))

    def call(rank, context):
        placement, error, expected = FakePlacement(devices[rank]), ErrorState(50, 2), ErrorState(50, 2)
        results = []
        for step, codec in enumerate([CODED[1], CODED[1], float16, topk, CODED[1], CODED[1]]):
            (host,) = values("float32", [(50,)], rank, 2, step)
            array, out = placement.array(host.copy()), np.zeros(50, np.float32)
            to_host = step in (1, 5)
            views = vectors.views_into([array.view()], out) if to_host else [array.view(array)]
            post(context, "gpu", views, codec, error, step)
            post(context, "expected", [view(host, "float32", "in place")], codec, expected, step)
            results.append((out if to_host else array.numpy(), host))
        return [*results, (error.worker, expected.worker), (error.server, expected.server)]

    assert_equal(world.run(call))


def _job():
    import bagua_hvd.torch as hvd

    hvd.init()
    placement, error = FakePlacement(own_device(0)), ErrorState(3000, hvd.size())
    array = placement.array(np.ones(3000, np.float32))
    try:
        for step in range(100_000):
            post(hvd.mpi_ops.basics.context(), "x", [array.view(array)], CODED[1], error, step)
    except HorovodInternalError as failure:
        placement.cuda.synchronize(placement.current)       # no stream hangs afterwards
        print("failed:", failure)


def test_an_error_of_nccl_ends_the_job_on_all_ranks(run_ranks):
    env = [{"BHVD_FAKE_CUDA_UUID": f"gpu{rank}"} for rank in range(2)]
    env[1]["BHVD_FAKE_NCCL_FAIL_AFTER"] = "5"
    for rank in run_ranks(2, _job, env=env):
        assert "failed: rank 1: NCCL 2.21.5 with CUDA 13.0 on GPU 0: it failed" in rank.output
